"""`nanstop doctor`."""
