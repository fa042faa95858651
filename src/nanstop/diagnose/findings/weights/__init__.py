"""4xx: weights and the optimizer."""
