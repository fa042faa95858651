"""The same training with the step taken by the scaler, which unscales."""

from case import train

train(through_scaler=True)
