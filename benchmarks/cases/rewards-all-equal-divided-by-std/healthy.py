"""The same training; 1e-4 is added to the deviation, as TRL does."""

from case import train

train(eps=1e-4)
