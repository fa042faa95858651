"""The same training; training takes its positions from the mask as well."""

from case import train

train(same_positions=True)
