"""The same training with a line search."""

from case import train

train(search="strong_wolfe")
