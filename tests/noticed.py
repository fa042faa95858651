"""What was told of a run in which every number is finite, whatever form it has."""


def noticed(findings, reports):
    """Return what was found of a run, and what its incidents of no training are of."""
    return [*findings, *(one.diagnoses[0] for one in reports if one.trains_nothing)]
