"""One watched run: the one place that knows the order of the stages."""
