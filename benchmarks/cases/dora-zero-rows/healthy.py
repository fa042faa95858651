"""The same training with LoRA, which divides by nothing."""

from case import train

train(dora=False)
