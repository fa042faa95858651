"""The same training; empty slots are encoded as if their padding were words, and set to 0 as
well.
"""

from case import train

train(skip_empty=True)
