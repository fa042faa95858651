"""Records of what commands find: in checkpoints, by probing a model, as a plan of formats."""
