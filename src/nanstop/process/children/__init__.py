"""A command in a bounded child process."""
