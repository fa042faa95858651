"""The same training with the adapter kept in float32 as in the first part."""

from case import train

train(adapter_in_float32=True)
