"""The same training; the order is that of the first session."""

from case import train

train(backwards=False)
