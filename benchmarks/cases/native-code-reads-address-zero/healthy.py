"""The same training with the buffer made at the start."""

from case import train

train(ready=True)
