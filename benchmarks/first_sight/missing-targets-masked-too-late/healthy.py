"""The same training; what is not known is left out before the loss."""

from case import train

train(mask_first=True)
