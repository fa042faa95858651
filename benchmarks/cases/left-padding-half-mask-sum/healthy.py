"""The same training with fused attention, which masks with a condition and adds nothing up in
float16.
"""

from case import train

train(attention="sdpa")
