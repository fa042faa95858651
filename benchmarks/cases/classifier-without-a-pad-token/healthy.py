"""The same training with a padding token."""

from case import train

from tiny import PAD

train(pad=PAD)
