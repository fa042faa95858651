"""The same training; padded tokens are set aside before the exponential."""

from case import train

train(mask_first=True)
