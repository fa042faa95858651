"""`nanstop bisect`."""
