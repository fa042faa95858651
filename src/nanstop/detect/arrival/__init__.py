"""Whether gradients arrive at what an optimizer holds, and whether it holds what is trained."""
