"""Evidence to findings, best first. Records only, never tensors."""
