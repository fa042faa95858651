"""The same training; the prompt leaves room for its answers."""

from case import train

train(keep_answers=True)
