"""The same training with a bias of zeros."""

from case import train

train(filled=True)
