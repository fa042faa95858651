"""The same training on a sound device."""

from case import train

train(fails_at=0)
