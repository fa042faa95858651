"""`nanstop compare`."""
