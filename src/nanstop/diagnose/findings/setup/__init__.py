"""1xx: how a run was set up."""
