"""Records as pages and notebooks."""
