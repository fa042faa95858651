"""What comes of gradients, from their backward to the change of the weights."""
