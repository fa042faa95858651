"""The same training; only classes that are present are logged."""

from case import train

train(only_present=True)
