"""`nanstop run`."""
