"""Every operation of one run, recorded."""
