"""The same training with the mean over tokens."""

from case import train

train(reduction="mean")
