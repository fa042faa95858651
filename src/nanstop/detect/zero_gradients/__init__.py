"""Gradients of exactly 0, update after update: whether any can arrive, and what makes them so."""
