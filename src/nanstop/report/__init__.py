"""Records to text, JSON and notebooks. No torch; HTML will live here."""
