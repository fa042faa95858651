"""The same training, in which a text without an image sees one placeholder patch."""

from case import train

train(placeholder=True)
