"""What helps: the cure that was proven and those beside it, what was tried, and what was not."""

from __future__ import annotations

from dataclasses import replace

from nanstop.decide.policy import DATA_REMEDIES
from nanstop.records import Atom, Diagnosis, Proof
from nanstop.records.line_forms import are_guards, is_bounded, typed_cure
from nanstop.records.remedies import describe, safety_of
from nanstop.report.text.blocks.block import Block
from nanstop.report.text.nearness import alternative_in_brackets, exact_fails, proof_in_brackets

MAX_UNTRIED = 3
_AGAIN = "[tried where the numbers are made again: finite with it, and all else as it was]"


def help_blocks(best: Diagnosis, proof: Proof | None) -> tuple[Block, ...]:
    """Return a block for each cure, the proven one first and then what is typed in place of one
    that leaves data out; else what was tried, or is usual.
    """
    if best.at_source is not None:
        cure = Block("help", "help: ", (describe((best.at_source,)), _AGAIN), gap="     ")
        return (cure, *help_blocks(replace(best, at_source=None, usual_cure=""), proof))
    if proof is None:
        return tuple(untried(best.remedies)) or _usual_cure(best)
    if proof.verdict == "none_found" or not proof.minimal:
        return tuple(_none_found(best, proof))
    cure = typed_cure(proof)
    others: dict[str, str] = {}
    for other in sorted(proof.alternatives, key=lambda one: one.atoms != cure):
        others.setdefault(describe(other.atoms), alternative_in_brackets(other, proof.reference))
    others.pop(describe(proof.minimal), None)
    cures = [(describe(proof.minimal), proof_in_brackets(proof))]
    cures += [(f"or {cure}", how) for cure, how in others.items()]
    shown = tuple(Block("help", "help: ", cells, gap="     ") for cells in cures)
    is_of_data = all(atom.remedy in DATA_REMEDIES for atom in cure)
    is_weak = proof.verdict == "plausible" and (are_guards(cure) or is_of_data)
    is_open = proof.verdict == "isolated" or is_weak
    return (*shown, *_usual_cure(best)) if is_open and not is_bounded(cure) else shown


def _usual_cure(best: Diagnosis) -> tuple[Block, ...]:
    if not best.usual_cure or best.confidence == "possible":
        return ()
    return (Block("help", "help: ", (f"the usual cure, not tried here: {best.usual_cure}",)),)


def untried(remedies: tuple[tuple[Atom, ...], ...]) -> list[Block]:
    """Return a block for each of the first few remedies that nobody has tried."""
    said = {describe(atoms): safety_of(atoms) for atoms in remedies}
    blocks = []
    for cure, safety in list(said.items())[:MAX_UNTRIED]:
        joint = "or " if blocks else ""
        changes = "; changes training" if safety != "safe" else ""
        cells = (f"{joint}{cure}", f"[not tried{changes}]")
        blocks.append(Block("help", "help: ", cells, gap="     "))
    return blocks


def _none_found(best: Diagnosis, proof: Proof) -> list[Block]:
    applicable = [trial for trial in proof.tried if trial.outcome != "not_applicable"]
    outcomes = ((describe(trial.atoms), trial.outcome.replace("_", " ")) for trial in applicable)
    tried = "; ".join(dict.fromkeys(f"{cure} ({outcome})" for cure, outcome in outcomes))
    said = f"nothing that was tried cures it: {tried}" if tried else "no remedy could be tried"
    label = "" if exact_fails(proof) else "next experiment: "  # else it is what was seen
    following = (f"{label}{proof.next_experiment}",) if proof.next_experiment else ()
    of_cures = any(not _is_a_question(trial.atoms) for trial in applicable)
    usual = () if of_cures else _usual_cure(best)  # what to do comes first
    texts = ("; ".join((said, *following)),) if usual and not tried else (said, *following)
    return [*usual, *(Block("help", "help: ", (text,)) for text in texts)]


def _is_a_question(atoms: tuple[Atom, ...]) -> bool:
    """Return whether a trial only asked if the script leaves out what is not finite, by another
    number where it reads that: what has made it so stays as it is.
    """
    return all(one.remedy == "finite_constant" and one.value.startswith("0:") for one in atoms)
