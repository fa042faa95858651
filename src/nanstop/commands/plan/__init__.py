"""`nanstop plan`."""
