"""The same training without a limit that anything reaches."""

from case import train

train(limit=float("inf"))
