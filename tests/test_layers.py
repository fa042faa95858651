"""Who may use whom, lazy imports and annotations included; no circles;
the size of files and functions.
"""

import ast
import sys
from functools import cache
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src" / "nanstop"

ROWS = (
    ("frozen",),
    ("errors", "wording", "language", "ranks", "tracebacks", "own_code", "pure_code", "living"),
    ("records",),
    ("numerics", "diagnose.evidence", "store", "decide", "rewrite"),
    ("replay", "diagnose.findings", "report.text"),
    ("tracing", "remedies", "diagnose"),
    ("localize", "measure", "report.html", "faults"),
    ("detect", "prove", "report"),
    ("session",),
    ("hosts",),
    ("hosts.model", "hosts.accelerate", "hosts.sharded"),
    ("hosts.tape",),
    ("hosts.trainer", "hosts.loop", "hosts.lightning"),
    ("hosts.script",),
    ("process",),
    ("process.children", "process.crash"),
    ("process.inject",),
    ("commands", "commands.scan", "commands.replay", "commands.view"),
    (
        *("commands.run", "commands.check", "commands.doctor", "commands.plan", "commands.bisect"),
        *("commands.lr_range", "commands.compare", "commands.explain", "commands.fix"),
        *("commands.export", "commands.prove"),
    ),
    ("watches",),
    ("api", "jupyter"),
    ("__init__",),
    ("demo",),
    ("cli",),
    ("__main__",),
)
"""From the ground up. A package uses its own files and packages of a lower row;
packages of one row do not know each other.
"""
ROW = {name: row for row, names in enumerate(ROWS) for name in names}

STDLIB_ONLY = set(ROWS[0] + ROWS[1] + ROWS[2])
ALSO_KNOWN = {
    "records.codec": {"pydantic", "pydantic_core"},
    "frozen": {"typing_extensions"},  # for type checkers only, which bring it
}
KNOWS_TORCH = {"numerics", "replay", "tracing", "remedies", "localize", "measure", "faults"} | {
    name for names in ROWS[ROW["detect"] : ROW["process"]] for name in names
}
HOST_LIBRARIES = {"transformers", "trl", "peft", "accelerate", "datasets", "lightning"}
HOST_LIBRARIES |= {"bitsandbytes"}
MAY_READ_ENVIRON = (
    "ranks",
    "language.choice",
    "session.factory",
    "session.machine",
    "process",
    "commands",
    "cli",
    "demo",
    "__main__",
)

FILES = sorted(f for f in SRC.rglob("*.py") if "pythonpath" not in f.parts)
MAX_FILES = 15
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60


def module_of(file):
    """``replay.step`` of ``src/nanstop/replay/step.py``; ``replay`` of its ``__init__``."""
    parts = file.relative_to(SRC).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


MODULES = {module_of(file): file for file in FILES}


def package_of(module):
    """The longest name in ROWS that ``module`` belongs to."""
    words = module.split(".")
    prefixes = (".".join(words[:end]) for end in range(len(words), 0, -1))
    return next((prefix for prefix in prefixes if prefix in ROW), None)


@cache
def tree_of(file):
    return ast.parse(file.read_text())


def imports(tree):
    """(line, full module name) of every import statement, wherever it stands;
    ``from a import b`` may name ``a.b``.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports between our packages are absolute"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def own(name):
    """The module of nanstop that an imported name is, or lies in; None for others'."""
    words = name.split(".")
    if words[0] != "nanstop":
        return None
    prefixes = (".".join(words[1:end]) for end in range(len(words), 1, -1))
    return next((prefix for prefix in prefixes if prefix in MODULES), "__init__")


@cache
def all_imports():
    return tuple(
        (module, f"{file.relative_to(SRC)}:{line}", name)
        for module, file in MODULES.items()
        for line, name in imports(tree_of(file))
    )


def wrong_direction(module, target):
    """Why ``module`` may not import ``target``, or None."""
    here, there = package_of(module), package_of(target)
    if here == there or ROW[there] < ROW[here]:
        return None
    return f"{here} (row {ROW[here]}) imports {there} (row {ROW[there]})"


def circles(edges):
    """The groups of nodes that can reach each other (Tarjan's strongly connected components
    above one node).
    """
    index, low, stack, found = {}, {}, [], []

    def visit(node):
        index[node] = low[node] = len(index)
        stack.append(node)
        for after in edges.get(node, ()):
            if after not in index:
                visit(after)
                low[node] = min(low[node], low[after])
            elif after in stack:
                low[node] = min(low[node], index[after])
        if low[node] == index[node]:
            group = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(group) > 1:
                found.append(sorted(group))

    for node in sorted(edges):
        if node not in index:
            visit(node)
    return found


def test_every_file_has_a_row():
    assert [module for module in MODULES if package_of(module) is None] == []


def test_packages_use_lower_rows_only():
    wrong = [
        (place, why)
        for module, place, name in all_imports()
        if (target := own(name)) and (why := wrong_direction(module, target))
    ]
    assert wrong == []


@pytest.mark.parametrize("unit", ["file", "package", "top folder"])
def test_there_is_no_circle(unit):
    of = {"file": str, "package": package_of, "top folder": lambda m: m.split(".")[0]}[unit]
    edges = {}
    for module, _, name in all_imports():
        target = own(name)
        if target and of(target) != of(module) and MODULES[target].name != "__init__.py":
            edges.setdefault(of(module), set()).add(of(target))
    assert circles(edges) == []


@pytest.mark.parametrize(
    ("module", "target", "allowed"),
    [
        ("diagnose.diagnose", "records.verdict", True),
        ("report.text.blocks.incident", "records.remedies", True),
        ("diagnose.diagnose", "report.text.blocks.incident", True),
        ("records.codec", "store.files", False),
        ("prove.search", "remedies.apply", True),
        ("session.session", "hosts.trainer.watch", False),
        ("hosts.trainer.watch", "hosts.loop.watch", False),
        ("commands.check.check", "commands.scan.scan", True),
        ("commands.scan.scan", "commands.check.check", False),
        ("replay.step", "__init__", False),
        ("errors", "records.facts", False),
    ],
)
def test_the_check_itself(module, target, allowed):
    assert (wrong_direction(module, target) is None) is allowed


def test_circles_are_found():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]


def may_name_torch(module):
    """A verb does its work on tensors in its child's half;
    what it returns and prints is read without torch.
    """
    if module.startswith("commands."):
        return module.rpartition(".")[2] not in ("text", "result")
    return package_of(module) in KNOWS_TORCH | {"api", "watches", "demo"}


def test_torch_is_named_where_tensors_are():
    wrong = [
        place
        for module, place, name in all_imports()
        if name.split(".")[0] == "torch" and not may_name_torch(module)
    ]
    assert wrong == []


def test_host_libraries_are_imported_by_hosts_and_demo_only():
    wrong = [
        (place, name)
        for module, place, name in all_imports()
        if name.split(".")[0] in HOST_LIBRARIES and module.split(".")[0] not in ("hosts", "demo")
    ]
    assert wrong == []


def test_the_bottom_needs_the_standard_library_only():
    known = {*sys.stdlib_module_names, "nanstop"}
    wrong = [
        (place, name)
        for module, place, name in all_imports()
        if package_of(module) in STDLIB_ONLY
        and name.split(".")[0] not in known | ALSO_KNOWN.get(module, set())
    ]
    assert wrong == []


def test_the_environment_is_read_by_the_shell_only():
    wrong = [
        (str(file.relative_to(SRC)), node.lineno)
        for module, file in MODULES.items()
        if not any(module == m or module.startswith(m + ".") for m in MAY_READ_ENVIRON)
        for node in ast.walk(tree_of(file))
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
    ]
    assert wrong == []


def test_folders_files_and_functions_stay_small():
    large = [
        (str(folder.relative_to(SRC)), number)
        for folder in {file.parent for file in FILES}
        if "findings" not in folder.parts
        and (number := sum(f.name != "__init__.py" for f in folder.glob("*.py"))) > MAX_FILES
    ]
    for file in FILES:
        lines = file.read_text().count("\n")
        if lines > MAX_FILE_LINES:
            large.append((str(file.relative_to(SRC)), lines))
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = node.end_lineno - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    large.append((f"{file.relative_to(SRC)}: {node.name}", lines))
    assert large == []
