"""Search over opaque atoms: minimization and proof. Knows nothing of remedies or models."""
