"""All that is on the disk."""
