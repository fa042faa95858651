"""transformers' Trainer and TRL's."""
