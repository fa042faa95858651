"""The same training; the teacher's logarithms come from log_softmax, which does not pass by 0."""

from case import train

train(in_logarithms=True)
