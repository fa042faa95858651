"""nanstop inside an unchanged script."""
