"""What notices that something is wrong, or about to be."""
