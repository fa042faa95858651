"""The same training with the root kept away from 0."""

from case import train

train(eps=1e-12)
