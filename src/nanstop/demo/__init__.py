"""Seed scenarios on tiny real architectures, with their data set."""
