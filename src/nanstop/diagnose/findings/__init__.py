"""One file a finding, in the folder of its hundred; `diagnose.catalogue` is the list."""
