"""Accelerate: what loops on it ask for."""
