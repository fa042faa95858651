"""What stands in for a session up to the first update of a training, and breaks the training off
there.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from nanstop.errors import NanstopError
from nanstop.records import RunFacts
from nanstop.session.off import OffSession
from nanstop.session.watched_run import OpenSession

if TYPE_CHECKING:
    from nanstop.detect.signals import Alarm
    from nanstop.replay.step import ModelView, Step

T = TypeVar("T")


class FirstWindow(OffSession):
    """Hands the first window that can be run again, healthy or not, to ``meet``, which does not
    return.

    ``meet`` is given None where there is none before the first update, and what a window has
    raised.
    """

    def __init__(self, meet: Callable[[Step | None, BaseException | None], NoReturn]) -> None:
        super().__init__()
        self._meet = meet
        self.view: ModelView

    def open(self, view: ModelView, facts: RunFacts) -> FirstWindow:
        """Return itself: what a host opens."""
        self.view, self.facts = view, facts
        return self

    def gauge_due(self, step: int) -> bool:  # noqa: ARG002
        return True

    def gauge(self, step: Step) -> None:
        self._meet(step, None)

    def failed(self, step: Step | None, alarm: Alarm, **_about: Any) -> NoReturn:
        self._meet(step, alarm.error)

    def completed(self, step: int, *, optimizer: int | None = None) -> None:  # noqa: ARG002
        self._meet(None, None)


class _Halt(BaseException):
    """Ends a training from inside; no ``except Exception`` of a callback may keep it going."""


def first_window(job: Callable[[Step], T], train: Callable[[OpenSession], object]) -> T:
    """Return what ``job`` returns of the first window of a training, which goes no further.

    ``train``: begins it under a watch with the opener it is given. Raises what the job or the
    window raised, and ``NanstopError`` where no window could be run again.
    """
    answers: list[T] = []
    errors: list[BaseException] = []

    def meet(step: Step | None, error: BaseException | None) -> NoReturn:
        if error is not None:
            errors.append(error)
        elif step is not None:
            try:
                answers.append(job(step))
            except Exception as failure:  # raised again outside the training
                errors.append(failure)
        raise _Halt

    with suppress(_Halt):
        train(FirstWindow(meet).open)
    if errors:
        raise errors[0]
    if not answers:
        raise NanstopError("no window could be run again before the first update")
    return answers[0]
