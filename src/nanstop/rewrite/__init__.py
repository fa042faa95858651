"""What a cure is in a user's own code: statements and arguments rewritten, byte for byte around."""
