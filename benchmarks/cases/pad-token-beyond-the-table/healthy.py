"""The same training with a table that has a row for the new token."""

from case import train

train(resize=True)
