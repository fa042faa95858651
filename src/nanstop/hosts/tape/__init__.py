"""What a loss is computed by, between inputs and backward, as calls that can be made again."""
