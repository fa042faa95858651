"""The same training with the answer of every row kept."""

from case import train

train(keep_answers=True)
