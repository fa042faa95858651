"""What trainers of policies show beside their loss.

Rewards as they came back, and how far two policies are apart.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from inspect import iscoroutinefunction, unwrap
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from nanstop.diagnose.evidence.objective import (
    ANSWERS_APART,
    HUGE,
    INF,
    LARGEST_REWARD,
    NAN,
    RATIO,
    RATIO_AT_ONCE,
    REWARDS_APART,
    UNSCORED,
)
from nanstop.hosts.trainer.options import group_size
from nanstop.hosts.trainer.steps.made_within import GeneratedError
from nanstop.numerics.tensors import format_name, nonfinite
from nanstop.own_code import is_class_of_library, is_of_library
from nanstop.records import Signal, SourceLine, StepId
from nanstop.tracebacks import passes_through
from nanstop.tracing.places import source_line
from nanstop.tracing.source.assignments import entries_put

if TYPE_CHECKING:
    from nanstop.hosts.patching import Patches

__tracebackhide__ = passes_through

_REWARDS = ("_calculate_rewards", "_calculate_rewards_from_functions")
_LOGPS = "_get_per_token_logps_and_entropies"
Note = Callable[[str, Any], None]


class Objective:
    """Looks on while a trainer of TRL scores completions and computes log-probabilities.

    Other trainers have neither.

    ``note(name, value)`` takes what there is to remember of the present step. The rewards are read
    where the trainer has just read them itself; ratios stay on the device.
    """

    def __init__(self, trainer: Any, note: Note) -> None:
        self._trainer = trainer
        self._note = note
        self._signals: tuple[Signal, ...] = ()
        self._generated_at: int | None = None
        self._logps: Tensor | None = None
        self._ends_there = False
        self.is_scoring = False
        """Whether rewards were asked for, and have not come back."""

    def install(self, patches: Patches) -> None:
        """Put the patches in place where the trainer has what they stand in for."""
        scores = [(name, self._on_rewards) for name in _REWARDS]
        for name, stand_in in (*scores, (_LOGPS, self._on_logps)):
            original = getattr(self._trainer, name, None)
            if original is not None:
                patches.set(self._trainer, name, functools.partial(stand_in, original))

    def generated(self, make: Callable[[], Any]) -> Any:
        """Return what ``make`` does, up to where it asks for rewards: the script's functions may
        ask a service for them.
        """
        self._ends_there = True
        try:
            return make()
        except GeneratedError:
            return None
        finally:
            self._ends_there = False

    def signals(self, at: StepId) -> tuple[Signal, ...]:
        """Return what was wrong with the rewards that the present batch was made from."""
        return tuple(
            Signal(source="reward", name=one.name, value=one.value, message=one.message, at=at)
            for one in self._signals
        )

    def compare(self, batch: Any) -> None:
        """Note how far the policy is from the one that generated ``batch``, after its loss.

        No synchronisation.
        """
        logps, self._logps = self._logps, None
        if logps is None or not isinstance(batch, Mapping):
            return
        old, mask = batch.get("old_per_token_logps"), batch.get("completion_mask")
        whole = batch.get("old_logps")
        if not isinstance(mask, Tensor) or mask.shape != logps.shape:
            return
        count = mask.sum(-1).clamp(min=1)
        if isinstance(old, Tensor) and old.shape == logps.shape:
            gap = ((logps - old).abs() * mask).sum() / count.sum()
        elif isinstance(whole, Tensor) and whole.shape == logps.shape[:1]:
            gap = (((logps * mask).sum(-1) - whole).abs() / count).mean()
        else:
            return
        at_once = self._generated_at == self._trainer.state.global_step
        self._note(RATIO_AT_ONCE if at_once else RATIO, gap.float())

    def _on_logps(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        first = found[0] if isinstance(found, tuple) else found
        if isinstance(first, Tensor) and torch.is_grad_enabled() and first.requires_grad:
            self._logps = first.detach()
        return found

    def _on_rewards(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        if self._ends_there:
            raise GeneratedError
        self.is_scoring = True
        rewards = self._scored(original, *args, **kwargs)
        self.is_scoring = False
        return rewards

    def _scored(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        trainer = self._trainer
        if not trainer.model.training:
            return original(*args, **kwargs)
        functions, asked = trainer.reward_funcs, Asked()
        with asked.listening(functions) as listened:
            trainer.reward_funcs = listened
            try:
                rewards = original(*args, **kwargs)
            finally:
                trainer.reward_funcs = functions
        self._generated_at = trainer.state.global_step
        if isinstance(rewards, Tensor) and rewards.dim() == 2:
            columns = dict(enumerate(rewards.T.tolist()))
            self._judge(columns, asked.num_none)
            self._compare_groups(columns.values(), args[2] if len(args) > 2 else None)
        else:  # one number a completion, in which what is no number may be left out already
            self._judge(asked.columns(), asked.num_none)
        return rewards

    def _judge(
        self, columns: Mapping[int, list[float]], num_none: Mapping[int, int | None]
    ) -> None:
        """Note the share of rewards that are not numbers, by the place of their function.

        A None that stands for "not mine" is none of them.
        """
        self._signals = ()
        names = _names(self._trainer)
        for place, column in columns.items():
            name = names[place]
            num_inf = sum(map(math.isinf, column))
            none = num_none.get(place, 0)
            num_nan = sum(map(math.isnan, column)) - none if none is not None else 0
            self._bad(f"{INF}{name}", num_inf, len(column), name, math.inf)
            self._bad(f"{NAN}{name}", num_nan, len(column), name, math.nan)
            huge = [abs(one) for one in column if LARGEST_REWARD < abs(one) < math.inf]
            self._bad(f"{HUGE}{name}", len(huge), len(column), name, max(huge, default=0.0))
        if len(columns) < len(names):
            return
        rows = list(zip(*columns.values(), strict=False))
        unscored = sum(all(map(math.isnan, row)) for row in rows)
        self._bad(UNSCORED, unscored, len(rows), "", math.nan)

    def _compare_groups(self, columns: Iterable[Sequence[Any]], answers: Any) -> None:
        """Note in how many groups rewards differ, and in how many answers, where rewards do in
        none.
        """
        size = group_size(self._trainer.args)
        if size is None or any(math.isnan(one) for column in columns for one in column):
            return
        rewards = list(zip(*columns, strict=True))
        apart = _share_apart(rewards, size)
        self._note(REWARDS_APART, apart)
        # Another process has the answers to the other rewards.
        if apart == 0.0 and isinstance(answers, list) and len(answers) == len(rewards):
            self._note(ANSWERS_APART, _share_apart(answers, size))

    def _bad(self, series: str, amount: int, total: int, name: str, value: float) -> None:
        if amount > 0:
            self._note(series, amount / total)
            told = f"{amount} of {total} rewards"
            self._signals += (Signal(source="reward", name=name, value=value, message=told),)


def _share_apart(rows: Sequence[Any], size: int) -> float:
    """Return the share of the groups of ``size`` rows that are not all the same."""
    groups = [rows[start : start + size] for start in range(0, len(rows), size)]
    apart = [any(one != group[0] for one in group) for group in groups]
    return sum(apart) / len(apart) if apart else 0.0


def rewards_at(trainer: Any) -> tuple[SourceLine, ...]:
    """Return where a trainer's reward functions are defined, each under the trainer's name for it;
    none of those that are models, or have no source.
    """
    named = ((_code(one), name) for one, name in _named_rewards(trainer))
    found = [(source_line((c, c.co_firstlineno)), name) for c, name in named if c is not None]
    return tuple(replace(line, function=str(name)) for line, name in found if line and line.text)


def entries_at(trainer: Any) -> tuple[SourceLine, ...]:
    """Return the lines at which classes of the script, that a trainer is of, put an entry into a
    batch, each under the entry's name; none of a name for which there are several. Reads sources.
    """
    own = (kind for kind in type(trainer).__mro__ if not is_class_of_library(kind))
    made = (getattr(one, "__code__", None) for kind in own for one in vars(kind).values())
    found: dict[str, list[SourceLine]] = {}
    for code in (one for one in made if isinstance(one, CodeType)):
        for name, number in entries_put(code):
            line = source_line((code, number))
            found.setdefault(name, []).extend([replace(line, function=name)] if line else [])
    return tuple(lines[0] for lines in found.values() if len(lines) == 1)


def reward_models(trainer: Any) -> tuple[tuple[str, str], ...]:
    """Return the name and the format of the weights of each reward function that is a model."""
    named = [(m, str(name)) for m, name in _named_rewards(trainer) if isinstance(m, nn.Module)]
    first = ((name, next(iter(model.parameters()), None)) for model, name in named)
    return tuple((name, format_name(one.dtype)) for name, one in first if one is not None)


def bad_weights_of_rewards(trainer: Any) -> tuple[tuple[str, str], ...]:
    """Return the name and a weight that is not finite of each reward function that is a model with
    such. Reads all their weights.
    """
    models = ((m, name) for m, name in _named_rewards(trainer) if isinstance(m, nn.Module))
    bad = ((str(name), nonfinite(dict(model.named_parameters()))) for model, name in models)
    return tuple((name, weights[0]) for name, weights in bad if weights)


def _named_rewards(trainer: Any) -> list[tuple[Any, str]]:
    functions = getattr(trainer, "reward_funcs", None)
    if not isinstance(functions, (list, tuple)):
        return []
    return list(zip(functions, _names(trainer), strict=True))


def _names(trainer: Any) -> list[str]:
    """Return what a trainer calls its reward functions, or what they are called."""
    functions, names = trainer.reward_funcs, getattr(trainer, "reward_func_names", None)
    if isinstance(names, (list, tuple)) and len(names) == len(functions):
        return list(map(str, names))
    return [str(getattr(one, "__name__", type(one).__name__)) for one in functions]


def _code(function: Any) -> CodeType | None:
    """Return the code of a function, or of what is called like one, behind what wraps it."""
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, nn.Module):
        return None
    function = unwrap(function)
    code = getattr(function, "__code__", None) or getattr(function.__call__, "__code__", None)
    return code if isinstance(code, CodeType) else None


def has_own_loss(trainer: Any) -> bool:
    """Return whether a trainer's loss is computed by a function of the script's own."""
    method = vars(trainer).get("compute_loss", type(trainer).compute_loss)
    functions = [method, getattr(trainer, "compute_loss_func", None)]
    return any(one is not None and not is_of_library(one) for one in functions)


class Asked:
    """What each reward function answered while it was listened to, by its place."""

    def __init__(self) -> None:
        self.num_none: dict[int, int | None] = {}
        """None, too, becomes NaN, and says something else. None where it is not known: of an answer
        that can be read once only, or that comes later.
        """
        self._answers: dict[int, Any] = {}

    @contextmanager
    def listening(self, functions: Sequence[Any]) -> Iterator[list[Any]]:
        """Yield functions that answer what ``functions`` do. A model, and a function that answers
        later, stay as they are.
        """
        models = [(i, one) for i, one in enumerate(functions) if isinstance(one, nn.Module)]
        hooks = [m.register_forward_hook(functools.partial(self._scored, i)) for i, m in models]
        try:
            yield [self._counted(one, place) for place, one in enumerate(functions)]
        finally:
            for hook in hooks:
                hook.remove()

    def columns(self) -> dict[int, list[float]]:
        """Return the rewards that are known. Synchronises the device where a model gave them."""
        found = {place: _numbers(answer) for place, answer in self._answers.items()}
        return {place: found[place] for place in sorted(found) if found[place]}

    def _scored(self, place: int, _model: nn.Module, _args: Any, output: Any) -> None:
        logits = getattr(output, "logits", None)
        if isinstance(logits, Tensor) and logits.dim() == 2:
            self._answers[place] = logits.detach()[:, 0]

    def _counted(self, function: Any, place: int) -> Any:
        if isinstance(function, nn.Module):
            return function
        if iscoroutinefunction(function) or iscoroutinefunction(function.__call__):
            self.num_none[place] = None
            return function

        @functools.wraps(function)
        def counting(*args: Any, **kwargs: Any) -> Any:
            answer = function(*args, **kwargs)
            if isinstance(answer, list | tuple):
                self.num_none[place] = sum(each is None for each in answer)
                self._answers[place] = answer
            else:
                self.num_none[place] = 0 if hasattr(answer, "dtype") else None
                self._answers[place] = answer if hasattr(answer, "dtype") else ()
            return answer

        return counting


def _numbers(answer: Any) -> list[float]:
    """Return rewards as numbers, and none where they are something else."""
    rows = answer.tolist() if hasattr(answer, "tolist") else answer
    try:
        return [math.nan if one is None else float(one) for one in rows]
    except (TypeError, ValueError):
        return []
