"""The same training with the name that GPT-2 gives its head."""

from case import train

train(head="score")
