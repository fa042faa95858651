"""The same training with groups of four."""

from case import train

train(num_generations=4)
