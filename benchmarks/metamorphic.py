"""Spell every case anew, in ways that mean the same, and see whether the answer stays.

    python benchmarks/metamorphic.py [--case NAME ...] [--rewrite NAME ...] [--table]

Each variant of ``benchmarks/cases/NAME/case.py`` is first run without nanstop, under the recorder
of the cases: it counts only if it fails at the same step in the same way, or, where nothing is
non-finite, prints the same numbers. Then it runs under ``nanstop run``, and code, operation,
module, line, step, micro-batch and row must be those of the unchanged case. What was said is kept
in ``results/metamorphic.json``, by case; the page made of it is ``docs/metamorphic.md``. The exit
code is 1 if one of its lines is not as it must be.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "cases"), str(HERE)]

from scoreboard_runs import Run, run_all  # noqa: E402  (found through the line above)
from truth import Truth, load_truths  # noqa: E402
from variants.answer import Answer, answer_of, changes, read_answer  # noqa: E402
from variants.catalogue import variants_of  # noqa: E402
from variants.operands import noted, noting  # noqa: E402
from variants.page import write_page  # noqa: E402
from variants.plain import Plain, Recorded, difference, read_plain  # noqa: E402
from variants.script import Place, Script, Variant  # noqa: E402

RESULTS = HERE / "results" / "metamorphic.json"
PAGE = HERE.parent / "docs" / "metamorphic.md"
AT_A_TIME = 10
"""Cases that are run between two writings of the results."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for and write the page; return 1 if a line is not as it must be."""
    asked = _arguments(arguments)
    truths = () if asked.table else load_truths(tuple(asked.case))
    by_imports = sorted(
        truths, key=lambda t: (Run("plain", "", t.folder / "case.py").imports, t.name)
    )
    for first in range(0, len(by_imports), AT_A_TIME):
        with tempfile.TemporaryDirectory() as folder:
            bench = Bench(Path(folder), asked.at_once, tuple(asked.rewrite))
            _keep(bench.run(by_imports[first : first + AT_A_TIME]))
    kept = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {"cases": {}}
    lines = write_page(load_truths(), kept, PAGE)
    print(*lines, sep="\n")
    return int(any(line.holds is False for line in lines))


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--case", action="append", default=[], metavar="NAME")
    parser.add_argument("--rewrite", action="append", default=[], metavar="NAME")
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--table", action="store_true", help="only write the page of what is kept")
    return parser.parse_args(arguments)


@dataclass
class Bench:
    """Runs cases and their variants. ``rewrites``: their names, empty for all."""

    folder: Path
    at_once: int
    rewrites: tuple[str, ...] = ()
    num_rounds: int = 0

    def run(self, truths: Sequence[Truth]) -> dict[str, dict[str, Any]]:
        """Return what is kept of each case."""
        known = {truth.name: truth for truth in truths}
        scripts = {name: truth.folder / "case.py" for name, truth in known.items()}
        plain, operands = self._as_they_are(scripts)
        made = {
            f"{name}.{one.rewrite.name}": one
            for name, path in scripts.items()
            for one in variants_of(Script(path.read_text(), operands.get(name, {})))
            if not self.rewrites or one.rewrite.name in self.rewrites
        }
        paths = {name: self._written(name, one.source) for name, one in made.items()}
        found = self._run([Recorded("plain", name, path) for name, path in paths.items()])
        other = {
            name: difference(
                plain[_case(name)], Plain(**found[name]), known[_case(name)], one.rewrite
            )
            for name, one in made.items()
        }
        same = {name: path for name, path in paths.items() if not other[name]}
        runs = [
            Run("nanstop", name, path, (), known[name if name in known else _case(name)].allow)
            for name, path in (scripts | same).items()
        ]
        said = {name: answer_of(one) for name, one in self._run(runs).items()}
        return _kept(list(known), made, other, said)

    def _as_they_are(
        self, scripts: Mapping[str, Path]
    ) -> tuple[dict[str, Plain], dict[str, dict[Place, tuple[bool, bool]]]]:
        """Return what the unchanged scripts do, and which operands in them are tensors."""
        sources = {name: noting(path.read_text()) for name, path in scripts.items()}
        noted_in = {f"{n}.noting": self._written(f"{n}.noting", s) for n, s in sources.items() if s}
        runs: list[Run] = [Run("plain", name, path) for name, path in noted_in.items()]
        runs += [Recorded("plain", name, path) for name, path in scripts.items()]
        found = self._run(runs)
        plain = {name: Plain(**found[name]) for name in scripts}
        return plain, {_case(name): found[name] for name in noted_in}

    def _run(self, runs: Sequence[Run]) -> dict[str, Any]:
        """Return what each run left, by its name."""
        found: dict[str, Any] = {}
        self.num_rounds += 1
        scratch = self.folder / f"round{self.num_rounds}"
        scratch.mkdir()
        run_all(runs, scratch, self.at_once, lambda run, one: found.update({run.name: one}), _read)
        print(f"{len(runs)} runs are done", flush=True)
        return found

    def _written(self, name: str, source: str) -> Path:
        path = self.folder / "scripts" / name / "case.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
        return path


def _read(run: Run, folder: Path) -> Any:
    """Return what a run left in its folder, by what it was run for."""
    if isinstance(run, Recorded):
        return read_plain(run, folder)
    return read_answer(run, folder) if run.tool == "nanstop" else noted(folder)


def _case(name: str) -> str:
    return name.rpartition(".")[0]


def _kept(
    cases: Sequence[str],
    made: Mapping[str, Variant],
    other: Mapping[str, str],
    said: Mapping[str, Answer],
) -> dict[str, dict[str, Any]]:
    """Return of each case its answer and, of each variant, what it changed or why it is none."""
    kept: dict[str, dict[str, Any]] = {
        name: {"answer": asdict(said[name]), "variants": {}} for name in cases
    }
    for name, variant in made.items():
        case, _, rewrite = name.rpartition(".")
        found: dict[str, Any] = {"not_the_same": other[name]}
        if not other[name]:
            changed = changes(said[case], said[name], variant)
            found = {"changed": changed, "answer": asdict(said[name])}
            if changed:
                print(f"{name}: {'; '.join(changed)}", flush=True)
        kept[case]["variants"][rewrite] = found
    return kept


def _keep(cases: Mapping[str, Mapping[str, Any]]) -> None:
    """Add to what is kept; of a case the variants that were not run again stay."""
    kept = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {"cases": {}}
    for name, found in cases.items():
        before = kept["cases"].get(name, {"variants": {}})
        kept["cases"][name] = {**found, "variants": before["variants"] | found["variants"]}
    kept["cases"] = dict(sorted(kept["cases"].items()))
    RESULTS.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
