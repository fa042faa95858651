"""A training step that can be run again, and all that undoes it bitwise."""
