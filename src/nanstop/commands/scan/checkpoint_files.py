"""The files of a checkpoint, opened without running anything that is in them."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nanstop.errors import NanstopError
from nanstop.numerics.tensors import format_name
from nanstop.records import KeyProblem
from nanstop.store.files import MAX_JSON_BYTES

PICKLED = (".bin", ".pt", ".pth")
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_SINGLES = (
    "adapter_model.safetensors",
    "adapter_model.bin",
    "model.safetensors",
    "pytorch_model.bin",
)
_NO_WEIGHTS = ("optimizer", "scheduler", "rng_state", "training_args", "scaler", "trainer_state")
"""What trainers write beside the weights."""

_NEEDS_CODE = ("GLOBAL", "REDUCE", "NEWOBJ", "BUILD", "callable", "class")
"""How torch says that a pickle asks for more than tensors and containers."""

_FORMATS: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}

Reader = Callable[[int, int], Tensor]
"""``read(start, stop)``: those values, flat and contiguous, in memory that the next call may
write again.
"""


@dataclass(frozen=True, slots=True)
class InSafetensors:
    """A tensor of a safetensors file, read into memory of ours.

    A file that shrinks meanwhile is an error and no crash.
    """

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    dtype_name: str
    offset: int

    @contextmanager
    def opened(self, buffer: Tensor) -> Iterator[Reader]:
        assert self.dtype is not None
        array: Any = buffer.numpy()  # numpy arrays are buffers
        dtype, size, into = self.dtype, self.dtype.itemsize, memoryview(array)
        with self.file.open("rb", buffering=0) as stream:
            same = buffer[:0].view(dtype)

            def read(start: int, stop: int) -> Tensor:
                nonlocal same
                length, done = (stop - start) * size, 0
                while done < length:
                    place = self.offset + start * size + done
                    got = os.preadv(stream.fileno(), [into[done:length]], place)
                    if not got:
                        raise NanstopError(f"{self.file}: ends inside `{self.name}`")
                    done += got
                if same.numel() != stop - start:
                    same = buffer[:length].view(dtype)
                return same  # every call of torch would hand the interpreter to another thread

            yield read


@dataclass(frozen=True, slots=True)
class InPickle:
    """A tensor of a ``torch.save`` file, mapped into memory where the file allows it."""

    name: str
    file: Path
    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype | None:
        plain = self.tensor.layout is torch.strided and not self.tensor.is_quantized
        return self.tensor.dtype if plain else None

    @property
    def dtype_name(self) -> str:
        return format_name(self.tensor.dtype)

    @contextmanager
    def opened(self, buffer: Tensor) -> Iterator[Reader]:
        del buffer
        flat = self.tensor.detach().resolve_conj().resolve_neg().reshape(-1)
        yield lambda start, stop: flat[start:stop].contiguous()


Stored = InSafetensors | InPickle
"""A tensor in a file: ``dtype`` is None for one that cannot be read as plain values;
``opened(buffer)`` gives a ``Reader``.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What was found at a path.

    ``config`` and ``adapter``: the JSON beside the weights, empty where there is none.
    """

    path: Path
    kind: Literal["model", "adapter"]
    files: tuple[Path, ...]
    tensors: tuple[Stored, ...]
    config: Mapping[str, Any]
    adapter: Mapping[str, Any]
    keys: tuple[KeyProblem, ...] = ()
    notes: tuple[str, ...] = ()


def open_checkpoint(path: Path) -> Checkpoint:
    """Return the tensors of a file or folder and the configs beside them; values are read later.

    Errors: ``NanstopError`` for what is missing, cut off, damaged or would need code to load.
    """
    if not path.exists():
        raise NanstopError(
            f"no such checkpoint: {path}",
            hint="a file or folder on this machine; a model of the Hub is downloaded first: "
            "hf download REPO --local-dir DIR",
        )
    folder = path if path.is_dir() else path.parent
    files, index, notes = _weight_files(path)
    tensors = tuple(tensor for file in files for tensor in _tensors(file))
    adapter = _json_of(folder / "adapter_config.json")
    is_adapter = bool(adapter) or files[0].name.startswith("adapter_model")
    return Checkpoint(
        path=path,
        kind="adapter" if is_adapter else "model",
        files=files,
        tensors=tensors,
        config=_json_of(folder / "config.json"),
        adapter=adapter,
        keys=_against_index(index, tensors),
        notes=notes,
    )


def _weight_files(path: Path) -> tuple[tuple[Path, ...], Mapping[str, str], tuple[str, ...]]:
    """Return the files with weights, the index (tensor -> file name), and what is to be said of
    their choice.
    """
    if path.name.endswith(".index.json"):
        return _indexed(path)
    if path.is_file():
        _require_known(path)
        return (path,), {}, ()
    for name in _INDEXES:
        if (path / name).is_file() and not (path / "adapter_config.json").is_file():
            return _indexed(path / name)
    for name in _SINGLES:
        if (path / name).is_file():
            return (path / name,), {}, ()
    found = sorted(path.glob("*.safetensors")) or [
        file
        for ending in PICKLED
        for file in sorted(path.glob(f"*{ending}"))
        if not file.name.startswith(_NO_WEIGHTS)
    ]
    if not found:
        raise _no_weights(path)
    notes = ("no index: every file with weights in the folder was read",) if len(found) > 1 else ()
    return tuple(found), {}, notes


def _require_known(file: Path) -> None:
    if file.suffix not in (".safetensors", *PICKLED):
        raise NanstopError(
            f"{file}: not a checkpoint that scan can read",
            hint="a .safetensors, .bin, .pt or .pth file, or a folder that holds them",
        )


def _no_weights(folder: Path) -> NanstopError:
    inner = sorted(one.name for one in folder.glob("checkpoint-*") if one.is_dir())
    hint = f"try `{folder / inner[-1]}`" if inner else "it needs .safetensors or .bin files"
    return NanstopError(f"{folder}: no weights in this folder", hint=hint)


def _indexed(index: Path) -> tuple[tuple[Path, ...], Mapping[str, str], tuple[str, ...]]:
    named = _json_of(index).get("weight_map")
    if not isinstance(named, dict) or not all(isinstance(one, str) for one in named.values()):
        raise NanstopError(f"{index}: has no `weight_map` from tensors to files")
    if not named:
        raise NanstopError(f"{index}: names no tensors")
    names = sorted(set(named.values()))
    for name in names:
        if Path(name).name != name:  # a path may lead out of the folder
            raise NanstopError(f"{index}: `{name}` is not a file of the same folder")
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        some = ", ".join(missing[:3])
        raise NanstopError(
            f"{index.parent}: {len(missing)} of {len(names)} shards missing: {some}",
            hint="the download or the copy was cut off: fetch the missing files again",
        )
    return tuple(index.parent / name for name in names), named, ()


def _against_index(index: Mapping[str, str], tensors: tuple[Stored, ...]) -> tuple[KeyProblem, ...]:
    if not index:
        return ()
    there = {tensor.name: tensor.file.name for tensor in tensors}
    lost = [name for name, file in index.items() if there.get(name) != file]
    return (
        *(
            KeyProblem(
                kind="missing",
                name=name,
                detail=f"the index places it in {index[name]}, which does not hold it",
                new_on_load=True,
            )
            for name in lost
        ),
        *(
            KeyProblem(kind="unexpected", name=name, detail=f"in {file}, and not in the index")
            for name, file in there.items()
            if name not in index
        ),
    )


def _json_of(file: Path) -> dict[str, Any]:
    """Return the JSON object of a file, empty where there is no file.

    Links are followed: the Hub's cache is made of them.
    """
    if not file.is_file():
        return {}
    try:
        if file.stat().st_size > MAX_JSON_BYTES:
            raise NanstopError(f"{file}: larger than {MAX_JSON_BYTES // 2**20} MiB")
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise NanstopError(f"{file}: not JSON ({error})") from error
    if not isinstance(found, dict):
        raise NanstopError(f"{file}: not a JSON object")
    return found


def _tensors(file: Path) -> tuple[Stored, ...]:
    return tuple(_in_safetensors(file) if file.suffix == ".safetensors" else _in_pickle(file))


def _in_safetensors(file: Path) -> Iterator[InSafetensors]:
    """Yield the tensors of a file that safetensors itself found sound.

    Offsets, sizes and shapes agree.
    """
    try:
        with safe_open(file, "pt"):
            pass
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length))
    except (SafetensorError, OSError, ValueError) as error:
        raise NanstopError(
            f"{file}: not a sound safetensors file ({_said(error)})",
            hint="a download or copy that was cut off looks like this: fetch the file again",
        ) from error
    for name, entry in header.items():
        if name != "__metadata__":
            yield InSafetensors(
                name=name,
                file=file,
                shape=tuple(entry["shape"]),
                dtype=_FORMATS.get(entry["dtype"]),
                dtype_name=_format_name(entry["dtype"]),
                offset=8 + length + entry["data_offsets"][0],
            )


def _format_name(word: str) -> str:
    known = _FORMATS.get(word)
    return format_name(known) if known is not None else word


def _in_pickle(file: Path) -> Iterator[InPickle]:
    for name, tensor in _flattened(_unpickled(file), ()):
        yield InPickle(name=name, file=file, tensor=tensor)


def _unpickled(file: Path) -> Any:
    """Return what ``torch.save`` wrote, by the unpickler that builds tensors and plain
    containers only.
    """
    try:
        try:
            return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap" not in str(error):
                raise
            return torch.load(file, map_location="cpu", weights_only=True)  # before torch 1.6
    except pickle.UnpicklingError as error:
        if not any(word in str(error) for word in _NEEDS_CODE):
            raise _damaged(file, error) from error
        raise NanstopError(
            f"{file}: holds objects that need code to load, and scan runs no code of a checkpoint",
            hint="save the state_dict alone, better as safetensors",
        ) from error
    except Exception as error:  # bytes of any kind make an unpickler raise anything
        raise _damaged(file, error) from error


def _damaged(file: Path, error: Exception) -> NanstopError:
    return NanstopError(
        f"{file}: not a sound torch.save file ({_said(error)})",
        hint="a download or copy that was cut off looks like this: fetch the file again",
    )


def _flattened(value: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of nested containers under its dotted path."""
    if isinstance(value, Tensor):
        yield ".".join(path) or "tensor", value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _flattened(one, (*path, str(key)))
    elif isinstance(value, (list, tuple)):
        for number, one in enumerate(value):
            yield from _flattened(one, (*path, str(number)))


def _said(error: Exception) -> str:
    return " ".join(str(error).split())[:160] or type(error).__name__
