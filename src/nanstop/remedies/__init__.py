"""Reversible cures: every remedy is a context manager, bitwise undone on exit.
Acts through ``ModelView`` only.
"""
