"""Watches whatever a script trains with, without a call of nanstop in it.

The only global state of nanstop is here.

What is replaced stands in one table: three methods of ``transformers.Trainer`` and, for raw loops,
a few functions of torch (see ``sinks``). ``unwatch`` puts everything back.
"""

from __future__ import annotations

import atexit
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from nanstop.detect.texts import TEXTS
from nanstop.errors import TrainingStopped
from nanstop.hosts.lightning.trainers import trainer_classes
from nanstop.hosts.model.left_weights import LEFT
from nanstop.hosts.patch_table import Table
from nanstop.hosts.script.script_warnings import show_at_script
from nanstop.own_code import is_library, without_own
from nanstop.tracebacks import passes_through

if TYPE_CHECKING:
    from nanstop.session.watched_run import OpenSession

__tracebackhide__ = passes_through

_log = logging.getLogger("nanstop")
table = Table()
"""All that is replaced in this process; what stands in for a training adds to it."""

_open_session: OpenSession | None = None
_loops: Any = None
_heard_by: list[Callable[[Any], None]] = []
_num_pauses = 0
_letting_go: Any = None
"""What lets go of models that the script has thrown away, from the import of torch on."""
_first_use: Any = None
"""What looks for the first step of a loop without an optimizer, None where it is not looked for."""
_compiles_functions = False


def install(open_session: OpenSession) -> None:
    """Watch trainers and loops from here on, as far as torch and transformers are imported.

    Called again after another import it adds what that import makes possible;
    ``open_session`` stays the first.
    """
    global _open_session  # noqa: PLW0603  (the one place for it)
    if _open_session is None:
        _open_session = open_session
        atexit.register(finish)
        table.replace(sys, "excepthook", _uncaught)
        table.replace(threading, "excepthook", _uncaught_in_thread)
        table.replace(warnings, "showwarning", show_at_script)
    if _loops is not None:
        _loops.imported()
    if "torch" in sys.modules:
        _stand_in_for_torch(sys.modules["torch"])
    # A module that is being imported, and imports another one meanwhile, has no class yet.
    model_class = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    if model_class is not None:
        table.replace(model_class, "from_pretrained", _load_pretrained)
    tokenizers = sys.modules.get("transformers.tokenization_utils_base")
    tokenizer_class = getattr(tokenizers, "PreTrainedTokenizerBase", None)
    if tokenizer_class is not None and "torch" in sys.modules:
        for name in ("__call__", "encode"):
            table.replace(tokenizer_class, name, _tokenize)
    trainer_class = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
    if trainer_class is not None:
        for name in ("train", "evaluate", "predict"):
            table.replace(trainer_class, name, partial(_call_trainer, name))
    for fitting_class in trainer_classes():
        table.replace(fitting_class, "fit", _fit)


def _stand_in_for_torch(torch: Any) -> None:
    global _letting_go  # noqa: PLW0603
    if _letting_go is None:
        from nanstop.hosts.letting_go import LettingGo

        _letting_go = LettingGo(lambda: _loops)
        _letting_go.install(table)
    utils = torch.nn.utils
    table.replace(torch.optim.Optimizer, "__init__", _made_optimizer)
    table.replace(torch.nn.Module, "load_state_dict", _load_weights)
    for owner in (torch.Tensor, torch.autograd):
        table.replace(owner, "backward", _backward)
    table.replace(torch.autograd, "grad", _grad)
    for name in ("grad", "grad_and_value", "jacrev", "jacfwd", "hessian", "vmap"):
        also = (torch,) if name == "vmap" else ()
        table.replace(torch.func, name, partial(_functional, name), also=also)
    for name in ("register_hook", "register_post_accumulate_grad_hook"):
        table.replace(torch.Tensor, name, _registering)
    # A script may import or call these before there is an optimizer.
    table.replace(torch, "compile", _compile)
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        table.replace(utils, name, partial(_clip, name), also=(utils.clip_grad,))
    _await_first_use()


def opener() -> OpenSession | None:
    """Return what opens sessions in this process, None before ``install``."""
    return _open_session


def tell(hear: Callable[[Any], None]) -> None:
    """Have ``hear`` told of every session that is opened in this process, by whoever opens it."""
    _heard_by.append(hear)


@contextmanager
def told(hear: Callable[[Any], None]) -> Iterator[None]:
    """Have ``hear`` told of every session that is opened inside."""
    _heard_by.append(hear)
    try:
        yield
    finally:
        _heard_by.remove(hear)


def opened(session: Any) -> None:
    """Tell whoever asked for it of a session that was opened."""
    for hear in _heard_by:
        hear(session)


def unwatch() -> None:
    """Put every replaced function back and finish what is being watched.

    Without ``install`` before, do nothing.
    """
    global _open_session, _loops, _first_use, _letting_go  # noqa: PLW0603
    _end_first_use()
    _first_use = None
    table.undo()
    if _open_session is not None:
        atexit.unregister(finish)
        finish()
    _open_session = _loops = _letting_go = None
    LEFT.optimizers_at_work = tuple
    TEXTS.forget()
    if "nanstop.detect.objective.fetched" in sys.modules:
        sys.modules["nanstop.detect.objective.fetched"].FETCHES.forget()


@contextmanager
def paused() -> Iterator[None]:
    """Leave raw loops alone inside: another watch owns what is being trained."""
    global _num_pauses  # noqa: PLW0603
    _end_first_use()
    if _loops is not None:
        _loops.state.leave()
    _num_pauses += 1
    try:
        with _loops.state.pause() if _loops is not None else nullcontext():
            yield
    finally:
        _num_pauses -= 1


def is_paused() -> bool:
    """Return whether raw loops are to be left alone now."""
    return _num_pauses > 0


def _made_optimizer(original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
    """Stand in for ``Optimizer.__init__``: with the first one a loop may begin, and what watches
    it is imported.
    """
    original(optimizer, *args, **kwargs)
    if _num_pauses or _open_session is None:
        return
    loops = _begun_loops(_open_session)
    loops.state.drop_unused()
    loops.made_optimizer(optimizer)


def _await_first_use() -> None:
    """Have the first step of a loop without an optimizer seen as it is made."""
    global _first_use  # noqa: PLW0603
    is_main = threading.current_thread() is threading.main_thread()
    if _first_use is None and _loops is None and is_main:
        from nanstop.hosts.loop.first_use import FirstUse

        _first_use = FirstUse(table, _watching_loops)


def _end_first_use() -> None:
    """Look for no first step any more."""
    if _first_use is not None:
        _first_use.end()


def _watching_loops(*, begins: bool = True) -> Any:
    """Return what watches raw loops, None where nothing is to watch them now, or does not yet."""
    torch = sys.modules["torch"]
    if _num_pauses or _open_session is None or torch.compiler.is_compiling():
        return None
    return _begun_loops(_open_session) if begins else _loops


def _load_weights(original: Any, module: Any, given: Any, *args: Any, **kwargs: Any) -> Any:
    """Stand in for ``Module.load_state_dict``: what it lacks is told of the model that trains."""
    from nanstop.hosts.model.loaded_weights import LOADED

    return LOADED.load(original, module, given, *args, **kwargs)


def _load_pretrained(original: Any, kind: Any, *args: Any, **kwargs: Any) -> Any:
    """Stand in for ``PreTrainedModel.from_pretrained``, as above."""
    from nanstop.hosts.model.loaded_weights import LOADED

    if _letting_go is not None:
        _letting_go.look()
    return LOADED.load_pretrained(original, kind, *args, **kwargs)


def _tokenize(original: Any, tokenizer: Any, *args: Any, **kwargs: Any) -> Any:
    """Stand in for what makes tokens of texts: the first of them are known again in batches."""
    from nanstop.hosts.model.tokenized import tokenized

    return tokenized(original, tokenizer, *args, **kwargs)


def _registering(original: Any, tensor: Any, hook: Any) -> Any:
    """Stand in for what registers hooks on tensors: their lines are told where they take something
    from a gradient.
    """
    from nanstop.tracing.source.hook_lines import registering  # with the first hook that there is

    return registering(original, tensor, hook)


def _backward(original: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
    """Stand in for ``Tensor.backward`` and ``torch.autograd.backward``: a script that has no
    optimizer and calls it trains by hand.
    """
    if _first_use is not None and _first_use.is_on:
        _end_first_use()
    loops = _loops
    if loops is None:
        if _num_pauses or _open_session is None or is_library(sys._getframe(2).f_code.co_filename):
            return original(loss, *args, **kwargs)
        loops = _begun_loops(_open_session)
    return loops.backward(original, loss, *args, **kwargs)


def _grad(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Stand in for ``torch.autograd.grad``: a script that has no optimizer and calls it may train
    by hand.
    """
    import torch

    if torch.compiler.is_compiling():  # a graph is to have torch's own
        return original(*args, **kwargs)
    if _num_pauses or _open_session is None or is_library(sys._getframe(2).f_code.co_filename):
        return original(*args, **kwargs)
    return _begun_loops(_open_session).grad(original, *args, **kwargs)


def _functional(name: str, original: Any, *args: Any, **kwargs: Any) -> Any:
    """Stand in for what makes another function of one (``torch.func.grad``), as above."""
    made = original(*args, **kwargs)
    compiler = sys.modules["torch"].compiler  # a graph is to have torch's own
    if compiler.is_compiling() or is_library(sys._getframe(2).f_code.co_filename):
        return made
    from nanstop.hosts.loop.functional import watched

    loops = partial(_watching_loops, begins=name.startswith("grad"))
    return watched(name, made, args, kwargs, loops)


def _begun_loops(open_session: OpenSession) -> Any:
    """Return what watches raw loops, which is imported with the first that there is."""
    global _loops  # noqa: PLW0603
    _end_first_use()
    if _loops is None:
        from nanstop.hosts.script.raw_loops import RawLoops

        _loops = RawLoops(open_session, table, compiles_functions=_compiles_functions)
        _loops.install()
        LEFT.optimizers_at_work = _loops.optimizers_at_work
    return _loops


def _compile(original: Any, model: Any = None, **options: Any) -> Any:
    """Stand in for ``torch.compile``: a compiled function is called so that it sees no tape; a
    module, or how it is called (``module.compile()``), never does.
    """
    global _compiles_functions  # noqa: PLW0603
    _end_first_use()
    from nanstop.hosts.compiled_functions import is_function, unseen_by_tapes

    compiled = original(model, **options)
    if not is_function(model, compiled):
        return compiled
    _compiles_functions = True
    if _loops is not None:
        _loops.state.compiles_functions = True
    return unseen_by_tapes(model, compiled, lambda: _loops)


def _clip(name: str, original: Any, *args: Any, **kwargs: Any) -> Any:
    """Stand in for a function of ``torch.nn.utils.clip_grad``."""
    if _loops is None:
        return original(*args, **kwargs)
    clip = _loops.sinks.clip_norm if name == "clip_grad_norm_" else _loops.sinks.clip_value
    return clip(original, *args, **kwargs)


def _fit(original: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Stand in for ``fit`` of Lightning's trainer: what is watched meanwhile its loggers learn."""
    from nanstop.hosts.lightning.loggers import Loggers

    loggers = Loggers(trainer)
    with told(loggers.opened):
        try:
            return original(trainer, *args, **kwargs)
        finally:
            loggers.end()


def _call_trainer(name: str, original: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Stand in for ``train``, ``evaluate`` and ``predict`` of ``transformers.Trainer``: this
    trainer is watched meanwhile.
    """
    own, open_session = vars(trainer), _open_session
    # A loop that uses a trainer to evaluate by is what is watched.
    if name != "train" and ("train" in own or _num_pauses or _loops is not None):
        return original(trainer, *args, **kwargs)
    with paused(), ExitStack() as scope:
        if "train" in own or open_session is None:  # the script watches this trainer itself
            return original(trainer, *args, **kwargs)
        # The watch takes over the method that it finds: a subclass's must not run twice.
        own[name] = partial(original, trainer)
        scope.callback(_letting_go.trainer_ended, trainer)
        scope.callback(own.pop, name, None)
        try:
            from nanstop.hosts.trainer.watch import watch_trainer

            known = {} if _loops is None else {"lines_of": _loops.lines_of}
            scope.callback(watch_trainer(trainer, open_session, **known).end)
        except Exception as error:  # nanstop is never the reason a run dies
            from nanstop.hosts.compat import not_watched

            level = logging.WARNING if name == "train" else logging.DEBUG
            _log.log(level, "nanstop: %s", not_watched(trainer, error))
        return getattr(trainer, name)(*args, **kwargs)


def _uncaught(original: Any, kind: Any, error: BaseException, traceback: Any) -> None:
    """Stand in for ``sys.excepthook``: a traceback of the script shows none of the frames that
    stand in for torch's.
    """
    seen: set[int] = set()
    chain: list[BaseException | None] = [error]
    while chain:
        one = chain.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        one.__traceback__ = without_own(one.__traceback__)
        chain += [one.__cause__, one.__context__]
    if _loops is not None and isinstance(error, Exception):
        _loops.judge.died(error)
    original(kind, error, without_own(traceback))


def _uncaught_in_thread(original: Any, died: Any) -> None:
    """Stand in for ``threading.excepthook``: a stop that nobody in a thread caught is the end of
    the training all the same.
    """
    if isinstance(died.exc_value, TrainingStopped):
        sys.last_value = died.exc_value  # as the interpreter does for the main thread
    original(died)


def finish() -> None:
    """Finish the session of raw loops.

    The exit code of a script that calls ``sys.exit`` is its parent's to know.
    """
    if _loops is not None:
        _loops.end()
        try:
            _loops.judge.refusals.report(at_end=True)
            _loops.finish(1 if getattr(sys, "last_value", None) is not None else 0)
        except TrainingStopped as stop:  # the script is over: nothing is left that could catch it
            sys.last_value = stop
            _log.warning("nanstop: %s", stop)
        except KeyboardInterrupt:  # whole are the incidents that were told
            _log.warning("nanstop: interrupted while the end of the run was written")
