"""What of a tape has to be played again, and the data that it begins at."""
