"""Updates under way: with a closure, or launched before their window was read."""
