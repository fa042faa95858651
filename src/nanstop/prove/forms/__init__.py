"""Other forms of a line as cures: what speaks for one, what is tried next, what is typed."""
