"""What a Python script will import, read from its text: nothing of the script is run."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

LIBRARIES = frozenset(
    (
        "accelerate",
        "datasets",
        "diffusers",
        "evaluate",
        "lightning",
        "numpy",
        "pandas",
        "peft",
        "pytorch_lightning",
        "safetensors",
        "scipy",
        "sentence_transformers",
        "sklearn",
        "timm",
        "tokenizers",
        "torch",
        "torchaudio",
        "torchvision",
        "transformers",
        "trl",
    )
)
"""Libraries that take time to import and do nothing else while they are:
no thread, no device, no look at arguments.
"""
FIRST = frozenset(("unsloth", "unsloth_zoo", "intel_extension_for_pytorch", "jax", "tensorflow"))
"""Libraries that change those above when they are imported before them, or start threads."""

_READING = ("get", "keys", "values", "items", "copy")
_WRITERS = ("putenv", "unsetenv", "load_dotenv")
_MAX_BYTES = 2**20
_MAX_FILES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Imports:
    """``modules``: each with the names taken from it, in the order of the text.

    ``folder``: where the script lies.

    ``variables``: what the script sets of its environment; ``defaults``: what it sets where it is
    not set yet. ``problem``: why the script has to be started by itself.
    """

    modules: tuple[tuple[str, tuple[str, ...]], ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    defaults: Mapping[str, str] = field(default_factory=dict[str, str])
    folder: str = ""
    problem: str = ""


def imports_of(script: Path) -> Imports:
    """Return what a script and the modules beside it import of ``LIBRARIES``, wherever the
    statement stands.
    """
    found = _Reader(script.resolve().parent)
    try:
        found.read(script)
    except (OSError, SyntaxError, ValueError, RecursionError) as error:
        return Imports(problem=f"{script} cannot be read ({type(error).__name__})")
    if found.problem:
        return Imports(problem=found.problem)
    modules = tuple((name, tuple(dict.fromkeys(taken))) for name, taken in found.modules.items())
    problem = "" if modules else "it imports none of the libraries that take long"
    return Imports(
        modules=modules,
        variables=found.variables,
        defaults=found.defaults,
        folder=str(found.folder),
        problem=problem,
    )


class _Reader:
    """Reads a script and what it imports from its own folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.modules: dict[str, list[str]] = {}
        self.variables: dict[str, str] = {}
        self.defaults: dict[str, str] = {}
        self.problem = ""
        self._read: set[Path] = set()

    def read(self, file: Path) -> None:
        if file in self._read or len(self._read) >= _MAX_FILES:
            return
        self._read.add(file)
        with file.open("rb") as stream:
            tree = ast.parse(stream.read(_MAX_BYTES))
        self._note_environment(tree)
        for module, names in _statements(tree):
            root = module.partition(".")[0]
            beside = [self.folder / f"{root}.py", self.folder / root / "__init__.py"]
            own = next((one for one in beside if one.is_file()), None)
            if own is not None:
                self.read(own)
            elif root in FIRST:
                self.problem = f"{root} wants to be imported before others"
            elif root in LIBRARIES:
                self.modules.setdefault(module, []).extend(names)

    def _note_environment(self, tree: ast.Module) -> None:
        """Note what is set always and to a text.

        What is set otherwise cannot be known without running the script.
        """
        always = {id(node) for node in _always_run(tree)}
        for node in ast.walk(tree):
            if not _writes(node):
                continue
            name, value = _setting(node)
            if id(node) not in always or name is None or value is None:
                line = getattr(node, "lineno", 0)
                self.problem = f"what line {line} of the script does to its environment is unknown"
            elif isinstance(node, ast.Call):
                self.defaults.setdefault(name, value)
            else:
                self.variables[name] = value


def _statements(tree: ast.Module) -> Iterator[tuple[str, list[str]]]:
    """Yield (module, names taken from it) of every absolute import, in the order of the text."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    for node in sorted(found, key=lambda one: (one.lineno, one.col_offset)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, []) for alias in node.names)
        elif not node.level and node.module:
            yield node.module, [alias.name for alias in node.names if alias.name != "*"]


def _always_run(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield the statements of a script that run whatever happens, and the expressions that are
    statements.
    """
    for statement in _top_level(tree.body):
        yield statement
        if isinstance(statement, ast.Expr):
            yield statement.value


def _top_level(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        yield statement
        if isinstance(statement, ast.If) and "__main__" in ast.unparse(statement.test):
            yield from _top_level(statement.body)


def _writes(node: ast.AST) -> bool:
    """Return whether a node changes the environment."""
    if isinstance(node, ast.Assign | ast.Delete):
        return any(map(_is_item, node.targets))
    if isinstance(node, ast.AugAssign):
        return _is_environ(node.target) or _is_item(node.target)
    if not isinstance(node, ast.Call):
        return False
    if isinstance(node.func, ast.Attribute) and _is_environ(node.func.value):
        return node.func.attr not in _READING
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return name in _WRITERS


def _setting(node: ast.AST) -> tuple[str | None, str | None]:
    """Return name and value where a node sets one variable to a text, else None."""
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        (target,) = node.targets
        return (_text(target.slice) if isinstance(target, ast.Subscript) else None), _text(
            node.value
        )
    if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "setdefault":
        texts = [*map(_text, node.args), None, None]
        return texts[0], texts[1]
    return None, None


def _is_item(node: ast.AST) -> bool:
    return isinstance(node, ast.Subscript) and _is_environ(node.value)


def _is_environ(node: ast.AST) -> bool:
    return (isinstance(node, ast.Attribute) and node.attr == "environ") or (
        isinstance(node, ast.Name) and node.id == "environ"
    )


def _text(node: ast.expr) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None
