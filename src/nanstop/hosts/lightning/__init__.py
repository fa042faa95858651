"""Lightning: what its loggers are told of a run that is watched."""
