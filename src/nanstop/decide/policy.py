"""What to do about a failure: a pure function of the user's wishes, what happened before, and what
was proven.

The session carries a decision out; nothing here touches a model, a file or a clock.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, Literal, get_args

from nanstop.decide.remembered import PolicyState, adopt, completed, left_out, remember
from nanstop.errors import NanstopError, unknown
from nanstop.frozen import frozen
from nanstop.records import Action, ActionKind, Atom, FailureKey, Proof
from nanstop.records.remedies import REMEDIES, safety_of

OnFailure = Literal["repair", "skip", "stop", "observe"]
OnStop = Literal["raise", "end"]

DATA_REMEDIES = frozenset({"drop_sample", "drop_micro"})
"""Remedies that name samples of one window: applied once, never kept for later steps."""

EXCEPTIONS_IN_A_ROW = 3
"""Updates that are left out one after another where each would have ended the run by an
exception of its own.
"""
MOST_LOST = 10
"""A run stops when one in so many updates of an optimizer is lost, and ``ENOUGH`` of them say
so.
"""
ENOUGH = 32


@frozen(kw_only=True)
class Policy:
    """How far nanstop may go.

    ``on_failure``: "repair" applies proven remedies that keep the mathematics (and those named in
    ``allow``), "skip" leaves a failing update out, "stop" ends the run, "observe" only reports.
    An update of finite gradients is never left out, whatever the loss.
    ``allow`` names remedies that change training (``"clip"``, ``"drop_sample"``).
    ``max_skips_in_a_row`` updates may be left out one after another, and of all that an optimizer
    makes no more than a tenth; the next failure stops the run. ``on_stop``: "raise" has ``train()``
    raise ``TrainingStopped``, "end" has it return as after early stopping. ``budget_seconds`` and
    ``budget_trials`` bound the search for a proof of one incident. ``quiet``: nothing is said at
    the end of a run. ``show_text``: reports show the training data around the place of a failure.
    ``audit_devices``: every so many steps the ranks that train one model run the same micro-batch
    and compare what their devices make of it; 0: never.

    Errors: ``NanstopError`` NS001 for an unknown option, value or remedy, with the nearest valid
    one.
    """

    on_failure: OnFailure = "repair"
    allow: tuple[str, ...] = ()
    max_skips_in_a_row: int = 32
    on_stop: OnStop = "raise"
    budget_seconds: float = 60.0
    budget_trials: int = 40
    quiet: bool = False
    show_text: bool = False
    audit_devices: int = 0

    def __new__(cls, **options: Any) -> Policy:
        known = [field.name for field in fields(cls)]
        for name in options:
            if name not in known:
                raise unknown("policy option", name, known)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        for option, words in (("on_failure", OnFailure), ("on_stop", OnStop)):
            if getattr(self, option) not in get_args(words):
                raise unknown(option, getattr(self, option), get_args(words))
        allow = (self.allow,) if isinstance(self.allow, str) else tuple(self.allow)
        for name in allow:
            if name not in REMEDIES:
                raise unknown("remedy in allow", name, sorted(REMEDIES))
        object.__setattr__(self, "allow", allow)
        for option in ("quiet", "show_text"):
            if not isinstance(getattr(self, option), bool):
                raise NanstopError(f"{option} must be True or False")
        _require_number("max_skips_in_a_row", self.max_skips_in_a_row, whole=True, least=0)
        _require_number("budget_seconds", self.budget_seconds, whole=False, least=0)
        _require_number("budget_trials", self.budget_trials, whole=True, least=1)
        _require_number("audit_devices", self.audit_devices, whole=True, least=0)


def decide(  # noqa: PLR0913 - called once, by name
    policy: Policy,
    state: PolicyState,
    *,
    key: FailureKey,
    proof: Proof | None,
    at_step: int,
    optimizer: int = 0,
    world_size: int = 1,
    can_veto: bool = True,
    weights_broken: bool = False,
    update_pending: bool = False,
    replays_clean: bool = False,
    harmless: bool = False,
    no_redo: str = "",
    is_past: bool = False,
) -> tuple[Action, PolicyState]:
    """Return what to do about this failure, and the state after it.

    ``proof`` None means that none was sought this time: the remedy proven for an earlier failure of
    the same kind is used. ``at_step``: how many updates ``optimizer``, a number, was to make before
    this one. ``weights_broken``: an earlier update left weights that are not finite, so that
    skipping cannot help; a proven remedy then asks for a rollback. ``update_pending``: the update
    that would break them has not been applied: it and those before it are made anew under the
    remedy, or it is left out; so are those that led to a failure where the remedy was proven on
    them. ``replays_clean``: the failure did not come back, so that "repair" needs no remedy.
    ``harmless``: all that the update is made of is finite, so that nothing but it would be lost.
    ``no_redo``: why gradients made anew would not be those of this update, empty where they would:
    a proven remedy is then on from the next update on, and this one is left out; ``is_past``: the
    script has its way with what is not.
    """
    cure, count, state = _met(policy, state, key, proof)
    at_once = _at_once(policy, key, world_size=world_size, can_veto=can_veto)
    if at_once is not None:
        return at_once, state
    led_here = proof is not None and proof.is_of_updates
    repairs, goes_back = policy.on_failure == "repair", weights_broken or update_pending or led_here
    stays = () if not repairs or _is_for_data(cure) else cure
    can_redo = not no_redo or goes_back
    is_left = is_past and not weights_broken and bool(no_redo or not (repairs and cure))
    if is_left or (stays and not can_redo):
        state = state if is_past else left_out(state, state.losses(optimizer))
        action = _for_later(policy, stays, proof, no_redo or RAISED, is_past=is_past)
        return action, adopt(state, stays)
    if repairs and cure and can_redo:
        before = completed(state, optimizer)
        kind, state = _repair(before, cure, count, at_step=at_step, goes_back=goes_back)
        why = _PENDING if update_pending else _why(kind, count, cure)
        return Action(kind=kind, atoms=cure, reason=why, proof=proof and proof.incident), state
    if repairs and replays_clean and not no_redo and not weights_broken:
        return Action(kind="redo", reason=_BY_CHANCE), completed(state, optimizer)
    if weights_broken:
        return Action(kind="stop", reason=_BROKEN), state
    if harmless:
        return Action(kind="continue", reason=_HARMLESS), state
    is_held_back = repairs and not can_redo and (cure or replays_clean)
    why = no_redo if is_held_back else _why_not_repaired(policy, proof)
    return _without_it(policy, state, key, why, optimizer=optimizer, num_updates=at_step)


def _met(
    policy: Policy, state: PolicyState, key: FailureKey, proof: Proof | None
) -> tuple[tuple[Atom, ...], int, PolicyState]:
    """Return the cure that may be applied to a failure, how often such failures have come now, and
    the state that remembers both.
    """
    known = state.occurrence(key)
    cure = known.cure if proof is None else _permitted(policy, proof)
    now = replace(known, count=known.count + 1, cure=() if _is_for_data(cure) else cure)
    return cure, now.count, remember(state, now)


def _without_it(
    policy: Policy,
    state: PolicyState,
    key: FailureKey,
    why: str,
    *,
    optimizer: int,
    num_updates: int,
) -> tuple[Action, PolicyState]:
    lost, row = state.losses(optimizer), state.in_a_row(optimizer)
    too_many = _too_many(policy, key, row, lost.num, num_updates=num_updates)
    if too_many:
        return Action(kind="stop", reason=f"{too_many}; {why}"), state
    return Action(kind="skip", reason=why), left_out(state, lost)


_BY_CHANCE = "the failure does not always come back: the step is run again as it is"
_BROKEN = "the weights themselves are not finite: skipping updates cannot help"
_HARMLESS = "the gradients are finite, only the loss is not: the update is applied"
REWRITTEN = "the script writes to its gradients, and those made anew would lack that"
IN_USE = "the script has used its gradients already"
RAISED = "the exception goes on to the script"
GIVEN_UP = "the script leaves this micro-batch out by itself"
ENDED = "the script ends its training at this micro-batch by itself"
_PENDING = "the update was held back before it did harm, and made anew under the proven remedy"


_TRAINS_NOTHING = "the run goes on, and trains nothing"
_STOPS_IT = "the policy is to stop at the first failure"


def for_nothing_trained(policy: Policy) -> Action:
    """Return what is done about a run whose updates change nothing: no number of it is bad, and
    there is nothing to leave out or to make anew.
    """
    if policy.on_failure == "stop":
        return Action(kind="stop", reason=_STOPS_IT)
    return Action(kind="observe", reason=_TRAINS_NOTHING)


def _permitted(policy: Policy, proof: Proof) -> tuple[Atom, ...]:
    """Return the atoms that were proven, or that leave out what fails, if the policy lets them
    be applied, else none.
    """
    if proof.verdict not in ("proven", "isolated") or _not_allowed(policy, proof):
        return ()
    return proof.minimal


def _not_allowed(policy: Policy, proof: Proof) -> tuple[Atom, ...]:
    """Return the atoms that change training and are not named in ``allow``."""
    changing = proof.safety != "safe" and safety_of(proof.minimal) == "safe"
    if changing:  # harmless one by one, not together
        return tuple(atom for atom in proof.minimal if atom.remedy not in policy.allow)
    return not_allowed(policy, proof.minimal)


def not_allowed(policy: Policy, atoms: tuple[Atom, ...]) -> tuple[Atom, ...]:
    """Return those of some atoms that change training and are not named in ``allow``."""
    changing = (atom for atom in atoms if safety_of((atom,)) != "safe")
    return tuple(atom for atom in changing if atom.remedy not in policy.allow)


def _is_for_data(cure: tuple[Atom, ...]) -> bool:
    return any(atom.remedy in DATA_REMEDIES for atom in cure)


def _at_once(policy: Policy, key: FailureKey, *, world_size: int, can_veto: bool) -> Action | None:
    """Return what is done whatever a proof says, None where that counts. Several ranks, or an
    update that cannot be held back, leave "observe"; "stop" on one rank needs no veto.
    """
    note = _only_observing(policy, key, world_size=world_size, can_veto=can_veto)
    if note:
        return Action(kind="observe", reason=note)
    if policy.on_failure == "stop":
        return Action(kind="stop", reason=_STOPS_IT)
    return None


def _only_observing(policy: Policy, key: FailureKey, *, world_size: int, can_veto: bool) -> str:
    """Return why nothing may be done but report, or an empty string."""
    if policy.on_failure == "observe":
        return "the policy is to observe"
    if world_size > 1:
        return f"{world_size} processes train together and have not met over this: observed only"
    if policy.on_failure == "stop":
        return ""
    if key.phase in ("evaluate", "generate"):
        what = "an evaluation" if key.phase == "evaluate" else "what the model generated"
        return f"it failed in {what}, which changes no weight: reported, nothing done"
    if not can_veto:
        return "this trainer's update cannot be held back: observed only"
    return ""


def _repair(
    state: PolicyState, cure: tuple[Atom, ...], count: int, *, at_step: int, goes_back: bool
) -> tuple[ActionKind, PolicyState]:
    if _is_for_data(cure):
        return "quarantine", state
    if goes_back:
        return "rollback", adopt(state, cure)
    if count >= 2 or at_step == 0:
        return "adopt", adopt(state, cure)
    return "redo", state


def _too_many(
    policy: Policy, key: FailureKey, in_a_row: int, lost: int, *, num_updates: int
) -> str:
    """Return what says that too many of the updates so far are lost, or an empty string."""
    most = policy.max_skips_in_a_row
    if in_a_row >= (min(most, EXCEPTIONS_IN_A_ROW) if key.kind == "exception" else most):
        return f"{in_a_row} updates in a row were skipped"
    if lost >= max(most, ENOUGH) and lost * MOST_LOST > num_updates:
        return f"{lost} of {num_updates} updates were skipped"
    return ""


def _why(kind: ActionKind, count: int, cure: tuple[Atom, ...]) -> str:
    whole = any(atom.remedy == "drop_micro" for atom in cure)
    occasion = f"this failure came {count} times" if count > 1 else "the first step failed"
    return {
        "quarantine": f"the {'micro-batch' if whole else 'sample'} is left out of this step",
        "rollback": "back to the last good weights, and on with the proven remedy",
        "adopt": f"the proven remedy stays on, because {occasion}",
        "redo": "the step is run again under the proven remedy",
    }[kind]


def _for_later(
    policy: Policy, cure: tuple[Atom, ...], proof: Proof | None, why: str, *, is_past: bool
) -> Action:
    """Return what is done where this update is beyond repair: a cure is in force from the next."""
    why = why if is_past else f"this update is skipped: {why}"
    if cure:
        why = f"{why}; from now on the proven remedy is in force"
        return Action(kind="adopt", atoms=cure, reason=why, proof=proof and proof.incident)
    if policy.on_failure == "repair":
        why = f"{why}; {_why_not_repaired(policy, proof)}"
    return Action(kind="continue", reason=why)


def _why_not_repaired(policy: Policy, proof: Proof | None) -> str:
    if policy.on_failure == "skip":
        return "the policy is to skip failing updates"
    if proof is None or proof.verdict == "none_found" or not proof.minimal:
        return "no remedy was found"
    if proof.verdict == "plausible":
        return "a remedy lets the step pass, but it was not shown to be as good as float32"
    names = sorted({f'"{atom.remedy}"' for atom in _not_allowed(policy, proof)})
    what = "leaving it out" if proof.verdict == "isolated" else "the proven remedy"
    return f"{what} would change what is trained, and waits to be allowed: {', '.join(names)}"


def _require_number(name: str, value: object, *, whole: bool, least: int) -> None:
    kinds = int if whole else (int, float)
    if not isinstance(value, kinds) or isinstance(value, bool) or not value >= least:
        kind = "a whole number" if whole else "a number"
        raise NanstopError(f"{name} must be {kind} of at least {least}, not {value!r}")
