"""The only place that knows transformers, TRL and raw training loops."""
