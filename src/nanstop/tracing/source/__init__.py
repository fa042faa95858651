"""The source of a script, read where something was found: what holds a tensor and gave it."""
