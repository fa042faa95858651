"""`nanstop scan`."""
