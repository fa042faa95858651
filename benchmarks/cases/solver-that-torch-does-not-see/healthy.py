"""The same training; the solver subtracts each row's largest exponent first."""

from case import train

train(in_logarithms=True)
