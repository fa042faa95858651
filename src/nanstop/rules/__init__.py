"""Findings: one file each, listed in ``catalogue.CATALOGUE``. Rules look at records, never at tensors."""
