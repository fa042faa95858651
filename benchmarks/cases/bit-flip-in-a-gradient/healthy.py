"""The same training over a sound link."""

from case import train

train(fails_at=0)
