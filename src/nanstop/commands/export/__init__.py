"""`nanstop export`: a checkpoint that computes finite without nanstop."""
