"""The same training; the estimate is taken of each token."""

from case import train

train(each_token=True)
