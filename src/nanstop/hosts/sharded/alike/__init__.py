"""Whether the ranks that train together are alike: their copies, their batches, their policies."""
