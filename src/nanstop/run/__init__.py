"""The shell around the pure parts: storage, policy, and the session that knows the order."""
