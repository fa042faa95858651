"""The same training; the schedule goes on with each update."""

from case import train

train(each_update=True)
