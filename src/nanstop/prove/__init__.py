"""The smallest remedy that cures a failing step, by experiment."""
