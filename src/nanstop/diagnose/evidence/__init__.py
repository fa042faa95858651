"""What findings read off the records."""
