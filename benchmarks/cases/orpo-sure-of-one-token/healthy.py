"""The same training; log-probabilities are taken in float32, and log(1 - p) from expm1, kept
from reaching log(0).
"""

from case import train

train(stable=True)
