"""The same training with the norm of the library."""

from case import train

train(fused=False)
