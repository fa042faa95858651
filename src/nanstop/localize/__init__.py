"""From a recorded run to the operation that broke it."""
