"""What a line computes, of the logarithms of its numbers."""
