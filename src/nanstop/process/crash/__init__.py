"""What a dead process left, and what it says."""
