"""Operands of what ends an objective."""
