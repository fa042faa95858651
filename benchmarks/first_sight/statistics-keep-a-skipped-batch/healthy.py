"""The same training; signals are clipped to what the sensors can mean."""

from case import train

train(clip_input=True)
