"""Records as text in a terminal."""
