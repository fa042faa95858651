"""Other processes: children, what a dead one left, nanstop inside a script."""
