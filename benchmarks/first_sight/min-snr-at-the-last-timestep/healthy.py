"""The same training; the weight is calculated in one piece, in which nothing is divided by 0."""

from case import train

train(in_two=False)
