"""The same training with the pad token of the tokenizer in the config."""

from case import PAD, train

train(pad=PAD)
