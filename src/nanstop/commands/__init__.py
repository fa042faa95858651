"""A folder a verb of the command line."""
