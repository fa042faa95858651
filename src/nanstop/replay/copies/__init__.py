"""Copies to go back to: of what an update changes, of buffers, of a run some updates ago."""
