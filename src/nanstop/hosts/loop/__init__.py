"""What every loop shares, and the manual interface."""
