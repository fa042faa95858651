"""Where an operation belongs: the module that runs it and the line of Python that asked for it.

Forward ops are placed by the stack of modules and of frames. A backward op has neither; it is
placed by its autograd node, whose sequence number was given out when the forward op was dispatched.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterator
from inspect import CO_OPTIMIZED
from traceback import walk_tb
from types import CodeType, FrameType
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.nn.modules import module as hooks

from nanstop.frozen import frozen
from nanstop.own_code import is_library, is_own, is_wrapper
from nanstop.records import SourceLine
from nanstop.replay.conditions import inside_transform

Line = tuple[CodeType, int] | None
"""A line that runs, by its code: None where only torch's own frames are on the stack."""
_sequence_nr = torch.autograd._get_sequence_nr  # pyright: ignore[reportPrivateImportUsage]
current_node = torch._C._current_autograd_node
graph_task = torch._C._current_graph_task_id

_ENGINE = "_engine_run_backward"
_CHECKPOINT = torch.utils.checkpoint.__file__
_APPLY = {
    vars(BackwardCFunction)[name].__code__
    for name in ("apply", "apply_boxed")  # the second since torch 2.15
    if name in vars(BackwardCFunction)
}
_MODULE_CALL = hooks.Module._call_impl.__code__
_REACH = 2
"""How many numbers count as a node's own:
a write through a view gives its second to ``CopySlices``.
"""


@frozen
class Place:
    """``op``: the forward op, and ``index`` its place in the trace, where it has one; ``line``:
    (code, line number), None where only torch's own frames were on the stack.
    """

    module: str
    line: Line
    op: str | None
    index: int | None = None


NOWHERE = Place("", None, "")


@frozen
class BackwardLine:
    """A line of the script that runs within a backward: of a forward run ``anew``, of a hook, else
    of a custom backward.
    """

    line: Line
    anew: bool
    by_hook: bool


class Places:
    """Follows modules and frames while its hooks are attached, and remembers where each autograd
    node came from.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self.others: list[tuple[str, nn.Parameter]] = []
        """Parameters of models that are called and are not under the root, after their classes."""
        self._names = {id(module): name for name, module in root.named_modules()}
        self._stack: list[str] = []
        self._handles: list[Any] = []
        self._hooked: set[int] = set()
        self._made: dict[tuple[int, int], Place] = {}
        self._parent: dict[int, int] = {-1: -1}
        self._recomputing = -1
        self._beginning: CodeType | None = None
        # Several models that a script calls by itself have a holder, which is never called.
        self._called = tuple(root.children()) if type(root) is nn.Module else (root,)
        self.left_root = False
        """Whether a model has been run: what follows outside of any is the script's own."""

    def attach(self, beginning: CodeType | None = None) -> None:
        """Follow modules from here on.
        ``beginning``: whose lines asked for the whole run and for none of its ops.
        """
        self._beginning = beginning
        self._handles = [
            hooks.register_module_forward_pre_hook(self._entered),
            hooks.register_module_forward_hook(self._returned, always_call=True),
        ]
        # What the hooks of a module run is its own: it is left after the last of them.
        hooked = [module for module in self._root.modules() if module._forward_hooks]
        self._hooked = {id(module) for module in hooked}
        self._handles += [m.register_forward_hook(self._left, always_call=True) for m in hooked]

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()

    @property
    def inside(self) -> bool:
        """Whether any module is being run."""
        return bool(self._stack)

    def _entered(self, module: nn.Module, _args: Any) -> None:
        if id(module) not in self._names and self._is_beside(module):
            self._adopt(module)
        inherited = self._stack[-1] if self._stack else type(module).__name__
        self._stack.append(self._names.get(id(module), inherited))

    def _is_beside(self, module: nn.Module) -> bool:
        """Return whether a module that is not under the root is a model of its own: called by the
        script, or, with weights, by a root whose call runs a whole loss (a teacher in it).
        """
        if not self._stack:
            return True
        return self._stack[-1] == "" and next(iter(module.parameters()), None) is not None

    def _adopt(self, module: nn.Module) -> None:
        """Name the parts of a model that is not under the root (a reference model) after its
        class.
        """
        for name, part in module.named_modules():
            label = type(module).__name__ + ("." + name if name else "")
            self._names.setdefault(id(part), label)
        if inside_transform():  # what it is called with is no tensor outside of it
            return
        kind = type(module).__name__
        self.others += [(f"{kind}.{name}", held) for name, held in module.named_parameters()]

    def _returned(self, module: nn.Module, args: Any, output: Any) -> None:
        if id(module) not in self._hooked:
            self._left(module, args, output)

    def _left(self, module: nn.Module, _args: Any, _output: Any) -> None:
        if self._stack:
            self._stack.pop()
        if any(module is called for called in self._called):
            self.left_root = True

    def forward(self, op: str, line: Line, index: int | None = None) -> Place:
        """Return the place of an op that is no backward op, and remember it for its node."""
        task = graph_task()
        if self._stack:
            module = self._stack[-1]
        else:  # a checkpointed plain function runs anew outside any module: its node's is meant
            node = current_node() if task != -1 else None
            module = self._nearest(node._sequence_nr(), task).module if node is not None else ""
        place = Place(module, line, op, index)
        if task != -1:
            self._recomputing = task
        # Autograd numbers a node before it dispatches:
        # the op's own number is the last one given out.
        self._made.setdefault((task, _sequence_nr() - 1), place)
        return place

    def backward(self, node: Any, written: BackwardLine) -> Place:
        """Return the place of the forward op whose gradient ``node`` computes, or of the custom
        function; what a hook asked for is no op's gradient.
        """
        task = graph_task()
        if task not in self._parent:
            # A backward that begins right after a recomputation runs inside it, over the nodes it
            # made.
            self._parent[task] = self._recomputing
        self._recomputing = -1
        found = self._nearest(node._sequence_nr(), task)
        if written.by_hook:
            return Place(found.module, written.line, None)
        if isinstance(node, BackwardCFunction):  # its forward is many ops, and none of its own
            name = type(node).__name__.removesuffix("Backward")
            return Place(found.module, written.line or found.line, name)
        return found

    def _nearest(self, number: int, task: int) -> Place:
        makers = dict.fromkeys((self._parent.get(task, -1), -1, task))
        for nearest in range(number, max(number - _REACH, -1), -1):
            for maker in makers:
                place = self._made.get((maker, nearest))
                if place is not None:
                    return place
        return NOWHERE

    def line(self) -> Line:
        """Return the innermost (code, line) that is no wrapper's, up to where nanstop began the
        run.
        """
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            code = frame.f_code
            if not is_wrapper(code.co_filename):
                return code, frame.f_lineno
            if code is self._beginning:
                break
            frame = frame.f_back
        return None

    def line_in_backward(self) -> BackwardLine:
        """Return the line within a running backward, and what runs it.

        Between the op and the engine stand only frames of a custom backward or of a hook, if any; a
        module's call or checkpoint's own code among them means a recomputation. The engine's
        threads on a GPU have no frames beyond.
        """
        found: Line = None
        anew = applied = False
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code.co_name != _ENGINE:
            code = frame.f_code
            anew = anew or code is _MODULE_CALL or code.co_filename == _CHECKPOINT
            applied = applied or code in _APPLY
            if found is None and not is_wrapper(code.co_filename):
                found = code, frame.f_lineno
            frame = frame.f_back
        return BackwardLine(found, anew, found is not None and not applied)


def source_line(line: Line) -> SourceLine | None:
    """Return the source text of a (code, line) pair."""
    if line is None:
        return None
    code, number = line
    text = linecache.getline(code.co_filename, number).strip()
    return SourceLine(file=code.co_filename, line=number, function=code.co_name, text=text)


def line_text(line: Line) -> str:
    """Return ``train.py:31: TEXT`` of a (code, line) pair, "" where there is none."""
    source = source_line(line)
    return f"{source.short}: {source.text}" if source else ""


def user_line() -> Line:
    """Return code and line of the innermost frame that belongs to the script."""
    frame = user_frame()
    return None if frame is None else (frame.f_code, frame.f_lineno)


def calling_line() -> Line:
    """Return code and line that called the innermost function of the script, None where a library
    did.
    """
    frame = user_frame()
    frame = frame.f_back if frame is not None else None
    if frame is None or is_library(frame.f_code.co_filename):
        return None
    return frame.f_code, frame.f_lineno


def variables() -> list[Any]:
    """Return what the variables of the innermost function that belongs to the script hold."""
    frame = user_frame()
    if frame is None:
        return []
    held = list(frame.f_locals.values())
    if sys.version_info < (3, 13) and frame.f_code.co_flags & CO_OPTIMIZED:
        frame.f_locals.clear()  # a copy that the frame keeps would hold the step's graph (PEP 667)
    return held


def raised_line(error: BaseException) -> Line:
    """Return code and line of the innermost frame of the script that an exception went through."""
    passed = ((frame.f_code, line) for frame, line in walk_tb(error.__traceback__))
    own = [(code, line) for code, line in passed if not is_library(code.co_filename)]
    return own[-1] if own else None


def user_frame() -> FrameType | None:
    """Return the innermost frame that belongs to the script."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_wrapper(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def frames_within(frame: FrameType) -> Iterator[FrameType]:
    """Yield the frames that one has called down to here, the innermost first, but nanstop's."""
    inner: FrameType | None = sys._getframe(1)
    while inner is not None and inner is not frame:
        if not is_own(inner.f_code.co_filename):
            yield inner
        inner = inner.f_back
