"""The same training with the end of the span where left padding puts it."""

from case import train

train(padding_side="left")
