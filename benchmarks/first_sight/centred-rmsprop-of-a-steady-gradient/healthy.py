"""The same training by RMSprop as it is by default."""

from case import train

train(centred=False)
