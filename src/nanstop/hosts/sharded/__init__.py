"""Trainings of several processes: what they share, and how they agree."""
