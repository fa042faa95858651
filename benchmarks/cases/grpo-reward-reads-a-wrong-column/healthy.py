"""The same training; the column has the name that the data set gives it."""

from case import train

train(column="answer")
