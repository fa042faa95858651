"""The same training with eight pairs in one micro-batch."""

from case import train

train(size=8)
