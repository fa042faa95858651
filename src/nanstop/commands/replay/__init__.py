"""`nanstop replay`: an incident met again, with the script as it is now."""
