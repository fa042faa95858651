"""8xx: what logs hide."""
