"""The same training with a norm that is never 0."""

from case import train

train(eps=1e-8)
