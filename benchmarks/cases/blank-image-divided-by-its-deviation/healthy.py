"""The same training without the scans that hold no picture."""

from case import train

train(skip_blank=True)
