"""Other tools, each run on the same scripts through the seam that its own documentation gives."""
