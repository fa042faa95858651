"""The same training with a reward of 0 for an empty completion."""

from case import guarded, train

train(score=guarded)
