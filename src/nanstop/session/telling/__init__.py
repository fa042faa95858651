"""What a run tells as it goes on: whoever follows it, and the user's own logs."""
