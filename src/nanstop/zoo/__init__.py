"""Unit-size planted faults and their healthy twins, keyed by code."""
