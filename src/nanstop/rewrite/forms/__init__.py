"""How another form of a line is typed."""
