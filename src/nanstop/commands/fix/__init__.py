"""`nanstop fix`: the cure of an incident as a change of the user's own files."""
