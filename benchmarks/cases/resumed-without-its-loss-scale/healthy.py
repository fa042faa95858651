"""The same training with the scaler restored as well."""

from case import train

train(keep_scaler=True)
