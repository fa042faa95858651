"""7xx: rewards, ratios, objectives."""
