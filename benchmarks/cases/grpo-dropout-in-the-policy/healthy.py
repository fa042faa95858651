"""The same training; dropout is off."""

from case import train

train(disable_dropout=True)
