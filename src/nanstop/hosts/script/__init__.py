"""Scripts without a call of nanstop. The only global state."""
