"""The same training with the optimizer built last."""

from case import train

train(head_first=True)
