"""The same training; the term is watched, and not added."""

from case import train

train(add_watched=False)
