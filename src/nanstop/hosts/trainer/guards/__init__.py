"""Guards around what a trainer does beside its steps."""
