"""Found first on ``PYTHONPATH`` by every Python process below ``nanstop run``: has nanstop watch
what is trained there.

Nothing is imported here but the standard library. When the process imports torch or transformers'
trainer by itself, nanstop follows; where nanstop cannot be imported nothing happens. A
``sitecustomize`` that this one hides is run, too.
"""

import importlib.machinery
import importlib.util
import os
import sys

# pathlib is not loaded yet.
_HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120


class _Following:
    """Finds modules as the others do.

    After the first execution of a wanted one, nanstop is told.
    """

    def __init__(self, *wanted):
        self._wanted = set(wanted)

    def find_spec(self, name, path=None, target=None):
        if name not in self._wanted:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next((one for one in found if one is not None), None)
        loader = getattr(spec, "loader", None)
        # Asking for a spec is no import: only its execution ends the wait.
        if hasattr(loader, "exec_module") and "exec_module" not in vars(loader):
            self._follow(name, loader)
        return spec

    def _follow(self, name, loader):
        execute = loader.exec_module

        def exec_module(module):
            vars(loader).pop("exec_module", None)
            execute(module)
            if name in self._wanted:
                self._wanted.discard(name)
                _watch()

        loader.exec_module = exec_module


def _watch():
    try:
        from nanstop.process.inject.start import start
    except ImportError:  # another environment than the one nanstop was started in
        return
    try:
        start()
    except Exception as error:
        sys.stderr.write(f"nanstop: not watching process {os.getpid()}: {error}\n")


def _run_hidden():
    """Run the ``sitecustomize`` that the interpreter would have found without this one."""
    own = sys.modules.pop("sitecustomize", None)
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is None or spec.loader is None:
        sys.modules["sitecustomize"] = own
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != _HERE]  # noqa: PTH100
if os.environ.get("NANSTOP_RUN") and os.environ.get("NANSTOP", "").lower() not in (
    "off",
    "0",
    "false",
):
    sys.meta_path.insert(
        0,
        _Following(
            *("torch", "transformers.modeling_utils", "transformers.trainer"),
            *("lightning.pytorch.trainer.trainer", "pytorch_lightning.trainer.trainer"),
        ),
    )
_run_hidden()
