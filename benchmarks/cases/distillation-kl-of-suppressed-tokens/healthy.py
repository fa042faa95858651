"""The same training; suppressed tokens are left out of both distributions."""

from case import train

train(drop_suppressed=True)
