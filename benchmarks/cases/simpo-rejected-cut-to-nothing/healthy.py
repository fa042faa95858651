"""The same training; each answer is cut to its own length."""

from case import train

train(each=True)
