"""Bad values that no operation writes: memory that another kernel writes, or that nobody does."""
