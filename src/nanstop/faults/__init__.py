"""Planted faults of unit size and their healthy twins, keyed by code."""
