"""`nanstop explain`."""
