"""The languages in which nanstop speaks: which one is asked for, and its sentences."""
