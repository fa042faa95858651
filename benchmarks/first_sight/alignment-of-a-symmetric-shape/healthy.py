"""The same training without the shape that has no direction."""

from case import train

train(cube_at=None)
