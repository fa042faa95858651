"""A model of a script's own, and what a process without nanstop finds in what the script has
written.

Run as ``python scripts_own.py FOLDER``: it reads every artifact there and prints what each is made
of.
"""

import importlib.abc
import json
import sys
from pathlib import Path

import torch
from torch import nn

FORMATS = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}


class Net(nn.Module):
    """A table, a norm with running statistics, and two layers of which the second is tied to
    nothing.
    """

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.norm = nn.BatchNorm1d(8)
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, ids):
        return self.head(torch.relu(self.body(self.norm(self.table(ids)))) * self.scale)


def made_of(found):
    """Describe classes, attributes, names and formats of an artifact; never its numbers."""
    if isinstance(found, torch.Tensor):
        grad = None if found.grad is None else made_of(found.grad)
        return [type(found).__name__, FORMATS.get(found.dtype, str(found.dtype)), grad]
    if isinstance(found, nn.Module):
        parts = {
            name: [type(part).__module__, type(part).__qualname__, sorted(vars(part))]
            for name, part in found.named_modules()
        }
        return [parts, made_of(found.state_dict()), made_of(dict(found.named_parameters()))]
    if isinstance(found, dict):
        return {str(key): made_of(value) for key, value in found.items()}
    if isinstance(found, (list, tuple)):
        return [made_of(value) for value in found]
    return type(found).__name__ if not isinstance(found, (str, bool)) else found


def answer_of(model, ids):
    """What a loaded model does: the format of its output, or the error that it ends with."""
    try:
        with torch.no_grad():
            output = model(ids)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return FORMATS[getattr(output, "logits", output).dtype]


def read(path):
    if path.suffix == ".script":
        loaded = torch.jit.load(path)
        return [{n: made_of(t) for n, t in loaded.state_dict().items()}, answer_of(loaded, IDS)]
    if path.suffix == ".pt2":
        program = torch.export.load(path)
        targets = [str(node.target) for node in program.graph.nodes]
        return [targets, made_of(dict(program.state_dict))]
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return made_of(load_file(path))
    if path.suffix == ".json":
        return json.loads(path.read_text())
    loaded = torch.load(path, weights_only=False)
    modules = isinstance(loaded, nn.Module)
    return [made_of(loaded), answer_of(loaded.eval(), IDS)] if modules else made_of(loaded)


IDS = torch.arange(6)


class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "nanstop":
            raise ModuleNotFoundError(f"{name}: there is no nanstop here", name=name)


def main(folder):
    import warnings

    warnings.simplefilter("ignore")
    sys.meta_path.insert(0, Blocked())
    torch.serialization.add_safe_globals([Net])
    found = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        try:
            found[str(path.relative_to(folder))] = read(path)
        except Exception as error:  # noqa: PERF203  (each artifact for itself)
            found[str(path.relative_to(folder))] = f"{type(error).__name__}: {error}"
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    sys.modules["scripts_own"] = sys.modules["__main__"]
    main(Path(sys.argv[1]))
