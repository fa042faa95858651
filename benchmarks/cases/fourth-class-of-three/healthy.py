"""The same training with a head for all four classes."""

from case import train

train(num_labels=4)
