"""`nanstop lr-range`."""
