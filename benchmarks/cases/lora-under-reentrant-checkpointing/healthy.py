"""The same training with checkpointing that does not re-enter autograd."""

from case import train

train(reentrant=False)
