"""The same training; the counts are smoothed."""

from case import train

train(smoothing=1e-5)
