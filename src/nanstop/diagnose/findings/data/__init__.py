"""5xx: data."""
