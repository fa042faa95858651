"""The same training with texts cut to the positions that there are."""

from case import train

train(cut=True)
