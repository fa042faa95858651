"""The same training; the encoder has no pooler."""

from case import train

train(add_pooling_layer=False)
