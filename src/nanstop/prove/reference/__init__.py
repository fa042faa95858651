"""The failing step in exact numbers, and how near to it another run comes."""
