"""What a tensor holds. Torch only: no modules, no steps."""
