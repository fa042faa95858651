"""Pure functions over tensors: tracing, replay, localization. Torch only; no files, no prints, no globals."""
