"""The same training with the guard of the paper."""

from case import GuardedLamb, train

train(optimizer=GuardedLamb)
