"""The learning rates that optimizers use, and those that are to come."""
