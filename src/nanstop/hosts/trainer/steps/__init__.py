"""A trainer's step that can be run again, and what a run of it again is given."""
