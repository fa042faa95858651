"""The same training without the recording that cannot hold its text."""

from case import train

train(drop_short=True)
