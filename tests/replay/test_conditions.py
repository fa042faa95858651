"""What a step is run again under leaves no trace in what the run itself warns of."""

import warnings

import pytest

from nanstop.replay.conditions import eager, unwarned


def warn():
    warnings.warn("once is enough", UserWarning, stacklevel=1)


@pytest.mark.parametrize("quiet", [unwarned, eager])
def test_a_warning_that_was_shown_is_not_shown_again(quiet, recwarn):
    warnings.resetwarnings()
    warnings.simplefilter("default")
    warn()
    with quiet():
        pass
    warn()
    assert len(recwarn) == 1


def test_nothing_is_warned_of_inside_and_filters_are_as_they_were():
    before = list(warnings.filters)
    with unwarned("once"):
        warn()
    with unwarned(), unwarned("another"):
        warn()
    assert list(warnings.filters) == before
    with pytest.warns(UserWarning, match="once"), unwarned("twice"):
        warn()
