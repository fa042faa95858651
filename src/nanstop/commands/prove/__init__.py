"""`nanstop prove`: whether a changed script, or a cure, is rid of an incident."""
