"""What an objective reads: whether it is what the objective expects, row by row."""
