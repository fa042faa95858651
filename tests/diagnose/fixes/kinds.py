"""How a numbered fix of a page is shown to cure: by a plant, a twin or a remedy, run here;
by a test elsewhere of what nanstop does; or it is words, and why.

Every fix has one of the kinds, or several of the first three.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fnstep import FnView
from nanstop.faults.specimen import Specimen, run_plain
from nanstop.faults.table import ZOO
from nanstop.records import Atom
from nanstop.remedies.apply import applied, dropped_micros, rebatch

HEALTHY = torch.tensor([[1.0, -2.0, 0.5], [0.25, 3.0, -1.0]])
BOUND = 1e4
"""No loss, weight or gradient of what was put right is as long."""


def sound(*tensors: Tensor) -> bool:
    """Whether all are finite and none is huge."""
    return all(bool((t.detach().double().abs() < BOUND).all()) for t in tensors)


def close(one: Tensor, other: Tensor, *, within: float = 1e-3) -> bool:
    return torch.allclose(one.double(), other.double(), rtol=within, atol=1e-3 * within)


@dataclass(frozen=True)
class Plant:
    """``healthy(fixed)``: whether all is well with the fault as it is, and with the fix.

    ``slow``: it takes more than a few seconds.
    """

    what: str
    healthy: Callable[[bool], bool]
    slow: bool = False

    def fault_fails(self) -> bool:
        return not self.healthy(False)

    def fix_cures(self) -> bool:
        return self.healthy(True)


@dataclass(frozen=True)
class Rows:
    """A function of rows [n, 3]: ``broken`` at the last row, right there in another form."""

    what: str
    fault: Tensor
    broken: Callable[[Tensor], Tensor]
    fixed: Callable[[Tensor], Tensor]

    def fault_fails(self) -> bool:
        before = backpropagated(self.broken, torch.cat([HEALTHY, self.fault]))
        return not all(bool(each.isfinite().all()) for each in before)

    def fix_cures(self) -> bool:
        loss, gradient = backpropagated(self.fixed, torch.cat([HEALTHY, self.fault]))
        _, right = backpropagated(self.broken, HEALTHY)
        return bool(loss.isfinite()) and sound(gradient) and close(gradient[:2], right)


@dataclass(frozen=True)
class Twin:
    """The healthy twin of a planted fault of ``nanstop.faults`` is the fault with the fix."""

    what: str
    code: str

    def fault_fails(self) -> bool:
        entry = ZOO[self.code]
        return entry.sign(entry.fault())

    def fix_cures(self) -> bool:
        entry = ZOO[self.code]
        run = run_plain(entry.healthy())
        gradient = run.num_nonzero_gradients > 0 and run.largest_gradient < BOUND
        return run.healthy and gradient and not entry.sign(entry.healthy())


@dataclass(frozen=True)
class Remedied:
    """nanstop's own remedy, on a planted fault of ``nanstop.faults``.

    ``others``: data was left out, and the update is that of the rest alone.
    """

    what: str
    code: str
    atoms: tuple[Atom, ...]

    def fault_fails(self) -> bool:
        specimen = self.specimen()
        healthy = run_plain(specimen).healthy and sound(*specimen.model.parameters())
        return not healthy or ZOO[self.code].sign(ZOO[self.code].fault())

    def specimen(self) -> Specimen:
        """The fault; where a micro-batch will be left out, with a healthy one behind it."""
        fault = ZOO[self.code].fault()
        if not dropped_micros(self.atoms):
            return fault
        return replace(fault, batches=(*fault.batches, *ZOO[self.code].healthy().batches))

    def fix_cures(self) -> bool:
        with self._under() as specimen:
            signed = ZOO[self.code].sign(specimen)
        with self._under() as specimen:
            if specimen.scaler is not None:
                self._settle(specimen)
            run = run_plain(specimen)
            after = [p.detach().clone() for p in specimen.model.parameters()]
        gradient = run.healthy and run.num_nonzero_gradients > 0
        return gradient and not signed and sound(torch.tensor(run.losses[0]), *after)

    @contextmanager
    def _under(self) -> Iterator[Specimen]:
        """What is left of the fault's data, and its model under the remedy."""
        specimen = self.specimen()
        view = FnView(specimen.model, specimen.optimizer)
        view.scaler = specimen.scaler
        gone = dropped_micros(self.atoms)
        left = tuple(
            rebatch(batch, self.atoms, micro=place)
            for place, batch in enumerate(specimen.batches)
            if place not in gone
        )
        with applied(view, self.atoms):
            yield replace(specimen, batches=left)

    def _settle(self, specimen: Specimen) -> None:
        """A scaler skips the first steps of a healthy run."""
        before = [p.detach().clone() for p in specimen.model.parameters()]
        run_plain(specimen)
        with torch.no_grad():
            for parameter, old in zip(specimen.model.parameters(), before, strict=True):
                parameter.copy_(old)


@dataclass(frozen=True)
class Tested:
    """What nanstop itself does, as a test elsewhere shows: ``tests/FILE::FUNCTION``."""

    test: str


@dataclass(frozen=True)
class Words:
    """Nothing can be planted for it. ``why``: in a few words."""

    why: str


Proof = Plant | Rows | Twin | Remedied
Cost = Callable[[], bool]


@dataclass
class Fixes:
    """What is known of the fixes of some pages, by (code, number)."""

    proofs: dict[tuple[str, int], list[Proof]] = field(default_factory=dict)
    tested: dict[tuple[str, int], Tested] = field(default_factory=dict)
    words: dict[tuple[str, int], Words] = field(default_factory=dict)
    costs: list[tuple[str, int, Cost]] = field(default_factory=list)

    def _add(self, code: str, number: int, proof: Proof) -> None:
        self.proofs.setdefault((code, number), []).append(proof)

    def plant(
        self, code: str, number: int, *, slow: bool = False
    ) -> Callable[[Callable[[bool], bool]], Callable]:
        def planted(healthy: Callable[[bool], bool]) -> Callable[[bool], bool]:
            self._add(code, number, Plant(healthy.__name__, healthy, slow))
            return healthy

        return planted

    def named_plant(self, code: str, number: int, what: str, healthy) -> None:
        self._add(code, number, Plant(what, healthy))

    def rows(self, code: str, number: int, what: str, *forms) -> None:
        self._add(code, number, Rows(what, *forms))

    def twin(self, code: str, number: int, fault: str = "") -> None:
        self._add(code, number, Twin("twin", fault or code))

    def remedy(
        self, code: str, number: int, remedy: str, target="", value="", fault: str = ""
    ) -> None:
        atoms = (Atom(remedy=remedy, target=target, value=value),)
        self._add(code, number, Remedied(remedy, fault or code, atoms))

    def test(self, code: str, number: int, test: str) -> None:
        self.tested[code, number] = Tested(test)

    def say(self, code: str, number: int, why: str) -> None:
        assert (code, number) not in self.words
        self.words[code, number] = Words(why)

    def cost(self, code: str, number: int) -> Callable[[Cost], Cost]:
        """What is said of a cost, or of safety (number 0), and can be counted."""

        def counted(holds: Cost) -> Cost:
            self.costs.append((code, number, holds))
            return holds

        return counted


def backpropagated(function: Callable[[Tensor], Tensor], rows: Tensor) -> tuple[Tensor, Tensor]:
    """The loss, and its gradient by ``rows``."""
    x = rows.clone().requires_grad_()
    loss = function(x)
    (gradient,) = torch.autograd.grad(loss, x)
    return loss.detach(), gradient
