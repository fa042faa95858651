"""2xx: the forward pass."""
