"""What the calls of a tape were given and have not made: weights, and tensors from outside."""
