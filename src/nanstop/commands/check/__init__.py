"""`nanstop check`."""
