"""The same training; 1 - p is kept from 0."""

from case import train

train(floor=1e-6)
