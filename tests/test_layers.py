"""The direction of imports, lazy ones included, and the size of files and functions."""

import ast
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src" / "nanstop"

LAYERS = (
    {"records", "errors", "suggest"},
    {"rules", "core", "report"},
    {"remedies", "search", "zoo"},
    {"run"},
    {"adapters"},
    # the demo uses what a user uses
    {"cli", "demo", "exhibit", "facade", "pages", "__init__", "__main__"},
)
TOP = len(LAYERS) - 1
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
SIDEWAYS = {("report", "rules")}

NO_TORCH = {
    "records",
    "errors",
    "suggest",
    "rules",
    "report",
    "search",
    "cli",
    "pages",
    "__init__",
    "__main__",
}
NO_TORCH_IN_RUN = {"store", "files", "summary", "policy"}
HOSTS = {"transformers", "trl", "peft", "accelerate", "datasets", "lightning", "bitsandbytes"}
MAY_KNOW_HOSTS = {"adapters", "demo"}
MAY_READ_ENVIRON = {"run", "adapters", "demo", "cli"}
STDLIB_ONLY = LAYERS[0]

FILES = sorted(SRC.rglob("*.py"))
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60


def part_of(file):
    """The package or module directly below ``nanstop`` that a file belongs to."""
    return file.relative_to(SRC).parts[0].removesuffix(".py")


def imports(tree):
    """(line, full module name) of every import statement, wherever it stands; ``from a import b`` may name ``a.b``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports between our packages are absolute"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def all_imports():
    for file in FILES:
        for line, name in imports(ast.parse(file.read_text())):
            yield file, f"{file.relative_to(SRC)}:{line}", name


def wrong_direction(part, name):
    """Why ``part`` may not import ``name``, or None."""
    words = name.split(".")
    if words[0] != "nanstop" or LEVEL[part] == TOP:
        return None
    target = words[1] if len(words) > 1 else "__init__"
    if target == part or (part, target) in SIDEWAYS:
        return None
    if LEVEL.get(target, TOP) >= LEVEL[part] and LEVEL[part] > 0:
        return f"{part} (layer {LEVEL[part]}) imports {target} (layer {LEVEL.get(target, TOP)})"
    return (
        None
        if LEVEL[part] or target in STDLIB_ONLY
        else f"{part} is at the bottom, imports {target}"
    )


def test_every_file_has_a_layer():
    assert {part_of(file) for file in FILES} <= set(LEVEL)


def test_layers_import_downwards_only():
    wrong = [
        (place, why)
        for file, place, name in all_imports()
        if (why := wrong_direction(part_of(file), name))
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("part", "name", "allowed"),
    [
        ("rules", "nanstop.records.Atom", True),
        ("report", "nanstop.rules.cures.describe", True),
        ("rules", "nanstop.report.codec", False),
        ("search", "nanstop.remedies.table", False),
        ("run", "nanstop.adapters.hf", False),
        ("run", "nanstop.search.prove", True),
        ("core", "nanstop.watch", False),
        ("records", "nanstop.rules", False),
        ("errors", "nanstop.records", True),
        ("cli", "nanstop.demo.scenarios", True),
        ("core", "torch.nn", True),
    ],
)
def test_the_check_itself(part, name, allowed):
    assert (wrong_direction(part, name) is None) is allowed


def test_torch_free_parts_do_not_name_torch():
    wrong = [
        place
        for file, place, name in all_imports()
        if name.split(".")[0] == "torch"
        and (part_of(file) in NO_TORCH or (part_of(file) == "run" and file.stem in NO_TORCH_IN_RUN))
    ]
    assert wrong == []


def test_host_libraries_are_imported_by_adapters_and_demo_only():
    wrong = [
        (place, name)
        for file, place, name in all_imports()
        if name.split(".")[0] in HOSTS and part_of(file) not in MAY_KNOW_HOSTS
    ]
    assert wrong == []


def test_the_bottom_needs_the_standard_library_only():
    import sys

    known = {*sys.stdlib_module_names, "nanstop"}
    wrong = [
        (place, name)
        for file, place, name in all_imports()
        if part_of(file) in STDLIB_ONLY and name.split(".")[0] not in known
    ]
    assert wrong == []


def test_the_environment_is_read_by_the_shell_only():
    wrong = [
        (str(file.relative_to(SRC)), node.lineno)
        for file in FILES
        if part_of(file) not in MAY_READ_ENVIRON
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
    ]
    assert wrong == []


def test_files_and_functions_stay_small():
    long = []
    for file in FILES:
        text = file.read_text()
        if text.count("\n") > MAX_FILE_LINES:
            long.append((str(file.relative_to(SRC)), text.count("\n")))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = node.end_lineno - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    long.append((f"{file.relative_to(SRC)}: {node.name}", lines))
    assert long == []
