"""The same training; the logarithm of the variance is kept between -20 and 20."""

from case import train

train(most=20.0)
