"""The same training with a loss scaler."""

from case import train

train(scaled=True)
