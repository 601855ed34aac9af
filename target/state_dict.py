"""The tensors in a file that torch.save wrote, found without executing its pickle.

Such a file is a zip archive: raw storages and a pickle that says how tensors lie in them. The
pickle is walked opcode by opcode; the few that describe a state dict are acted out on inert
objects, anything else is refused by name, so no code of the file can run. Knows nothing of models.
"""

from __future__ import annotations

import pickletools
import struct
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spec_serve.target.gguf import CheckpointError

MAX_PICKLE = 64 << 20
"""Bytes; the description of the largest models takes a few MiB."""

CHUNK = 4 << 20

_STORAGES = {
    "torch DoubleStorage": torch.float64,
    "torch FloatStorage": torch.float32,
    "torch HalfStorage": torch.float16,
    "torch BFloat16Storage": torch.bfloat16,
    "torch LongStorage": torch.int64,
    "torch IntStorage": torch.int32,
    "torch ShortStorage": torch.int16,
    "torch CharStorage": torch.int8,
    "torch ByteStorage": torch.uint8,
    "torch BoolStorage": torch.bool,
}
_DICT = "collections OrderedDict"
_TENSOR = "torch._utils _rebuild_tensor_v2"
_PARAMETER = "torch._utils _rebuild_parameter"
_ALLOWED = {_DICT, _TENSOR, _PARAMETER, *_STORAGES}
_MARK = object()
# All that zipfile raises for a damaged archive, one that asks for a password among them.
_DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    OSError,
    EOFError,
    RuntimeError,
    ValueError,
    KeyError,
    OverflowError,
)


@dataclass(frozen=True, slots=True)
class _Global:
    name: str


@dataclass(frozen=True, slots=True)
class Storage:
    """count: elements of `dtype`. key: the name of its entry in the archive."""

    key: str
    dtype: torch.dtype
    count: int


@dataclass(frozen=True, slots=True)
class View:
    """A tensor: where it lies in a storage, counted in elements."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class SavedTensors:
    """The state dict of one file; a context manager.

    views: tensors by name. Raises CheckpointError for a file that isn't one or that holds more than
    a state dict's description.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._archive = zipfile.ZipFile(path)
        except _DAMAGE as error:
            raise CheckpointError(
                f"{path}: not a file of torch.save, or in its format before torch 1.6 ({error})"
            ) from error
        try:
            self._root, self.views = self._open()
        except BaseException:
            self._archive.close()
            raise

    def __enter__(self) -> SavedTensors:
        return self

    def __exit__(self, *_: object) -> None:
        self._archive.close()

    def read(self, storage: Storage) -> Tensor:
        """The elements of a storage. # [count]"""
        data = self._entry(f"{self._root}data/{storage.key}")
        if not storage.count:
            return torch.empty(0, dtype=storage.dtype)
        return torch.frombuffer(data, dtype=storage.dtype, count=storage.count)

    def _entry(self, name: str) -> bytearray:
        try:
            data = bytearray(self._archive.getinfo(name).file_size)
            with self._archive.open(name) as source:
                at, view = 0, memoryview(data)
                while chunk := source.read(CHUNK):
                    view[at : at + len(chunk)] = chunk
                    at += len(chunk)
        except _DAMAGE as error:
            raise CheckpointError(f"{self._path}: damaged at {name!r} ({error})") from error
        if at < len(data):
            raise CheckpointError(f"{self._path}: cut short at {name!r}")
        return data

    def _open(self) -> tuple[str, dict[str, View]]:
        names = [n for n in self._archive.namelist() if n == "data.pkl" or n.endswith("/data.pkl")]
        if len(names) != 1 or names[0].count("/") > 1:
            raise CheckpointError(f"{self._path}: not a file of torch.save (no data.pkl)")
        root = names[0].removesuffix("data.pkl")
        size = self._path.stat().st_size
        for entry in self._archive.infolist():
            # torch never compresses, and what is packed could be a bomb.
            if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
                raise CheckpointError(f"{self._path}: {entry.filename} is compressed")
            if entry.file_size > size:
                raise CheckpointError(f"{self._path}: {entry.filename} is larger than the file")
        if self._archive.getinfo(names[0]).file_size > MAX_PICKLE:
            raise CheckpointError(f"{self._path}: its description is larger than {MAX_PICKLE}")
        order = f"{root}byteorder"
        if order in self._archive.NameToInfo and self._entry(order) != b"little":
            raise CheckpointError(f"{self._path}: not little-endian")
        value = _Walk(self._path).run(bytes(self._entry(names[0])))
        if isinstance(value, dict) and isinstance(value.get("state_dict"), dict):
            value = value["state_dict"]
        if not isinstance(value, dict):
            raise CheckpointError(f"{self._path}: holds no dictionary of tensors")
        views = {k: v for k, v in value.items() if isinstance(k, str) and isinstance(v, View)}
        if not views:
            raise CheckpointError(f"{self._path}: holds no tensors by name")
        for name, view in views.items():
            self._check(root, name, view)
        return root, views

    def _check(self, root: str, name: str, view: View) -> None:
        storage, what = view.storage, f"{self._path}: tensor {name!r}"
        entry = self._archive.NameToInfo.get(f"{root}data/{storage.key}")
        if entry is None or entry.file_size < storage.count * storage.dtype.itemsize:
            raise CheckpointError(f"{what}: its storage {storage.key!r} is missing or cut short")
        elements = 1
        for dim in view.shape:
            elements *= dim
        if elements > storage.count:
            raise CheckpointError(f"{what}: more elements than its storage has")
        reach = sum((n - 1) * step for n, step in zip(view.shape, view.stride, strict=True))
        if elements and view.offset + reach >= storage.count:
            raise CheckpointError(f"{what}: reaches beyond its storage")


class _Walk:
    """A pickle machine that can only build containers, numbers, strings and views."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._simple: dict[str, Callable[[Any], None]] = {
            "NONE": lambda _: self._stack.append(None),
            "NEWTRUE": lambda _: self._stack.append(True),
            "NEWFALSE": lambda _: self._stack.append(False),
            "EMPTY_DICT": lambda _: self._stack.append({}),
            "EMPTY_LIST": lambda _: self._stack.append([]),
            "EMPTY_TUPLE": lambda _: self._stack.append(()),
            "MARK": lambda _: self._stack.append(_MARK),
            "TUPLE": lambda _: self._stack.append(tuple(self._marked())),
            "TUPLE1": lambda _: self._stack.append(tuple(self._last(1))),
            "TUPLE2": lambda _: self._stack.append(tuple(self._last(2))),
            "TUPLE3": lambda _: self._stack.append(tuple(self._last(3))),
            "GLOBAL": lambda name: self._stack.append(self._global(name)),
            "STACK_GLOBAL": lambda _: self._stack.append(self._global(self._two_strings())),
            "BINPERSID": lambda _: self._stack.append(self._storage(self._stack.pop())),
            "REDUCE": lambda _: self._stack.append(self._call(*self._last(2))),
            "BUILD": lambda _: self._build(),
            "APPEND": lambda _: self._extend(self._last(1)),
            "APPENDS": lambda _: self._extend(self._marked()),
            "SETITEM": lambda _: self._update(self._last(2)),
            "SETITEMS": lambda _: self._update(self._marked()),
            "MEMOIZE": lambda _: self._memo.__setitem__(len(self._memo), self._stack[-1]),
        }
        for name in ("BINPUT", "LONG_BINPUT"):
            self._simple[name] = lambda i: self._memo.__setitem__(i, self._stack[-1])
        for name in ("BINGET", "LONG_BINGET"):
            self._simple[name] = lambda i: self._stack.append(self._memo[i])
        for name in ("PROTO", "FRAME"):
            self._simple[name] = lambda _: None
        for name in ("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"):
            self._simple[name] = self._stack.append
        for name in ("BINUNICODE", "SHORT_BINUNICODE"):
            self._simple[name] = self._stack.append

    def run(self, data: bytes) -> Any:
        try:
            for opcode, argument, _ in pickletools.genops(data):
                if opcode.name == "STOP":
                    return self._stack.pop()
                act = self._simple.get(opcode.name)
                if act is None:
                    raise self._refuse(f"opcode {opcode.name}")
                act(argument)
        except CheckpointError:
            raise
        except (ValueError, IndexError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{self._path}: its pickle is damaged") from error
        raise CheckpointError(f"{self._path}: its pickle has no end")

    def _refuse(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self._path}: its pickle uses {what}, which a state dict does not need; refused"
        )

    def _last(self, count: int) -> list[Any]:
        if len(self._stack) < count:
            raise IndexError("stack")
        taken = self._stack[-count:]
        del self._stack[-count:]
        return taken

    def _marked(self) -> list[Any]:
        at = len(self._stack) - 1
        while self._stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise IndexError("mark")
        taken = self._stack[at + 1 :]
        del self._stack[at:]
        return taken

    def _global(self, name: str) -> _Global:
        if name not in _ALLOWED:
            raise self._refuse(name.replace(" ", "."))
        return _Global(name)

    def _two_strings(self) -> str:
        module, name = self._last(2)
        if not isinstance(module, str) or not isinstance(name, str):
            raise TypeError("global")
        return f"{module} {name}"

    def _storage(self, described: Any) -> Storage:
        tag, kind, key, _, count = described
        if tag != "storage" or not isinstance(kind, _Global) or kind.name not in _STORAGES:
            raise self._refuse("a storage of unknown kind")
        if not isinstance(key, str) or type(count) is not int or count < 0:
            raise TypeError("storage")
        return Storage(key, _STORAGES[kind.name], count)

    def _call(self, function: Any, arguments: Any) -> Any:
        name = function.name if isinstance(function, _Global) else None
        if name == _DICT and arguments == ():
            return {}
        if name == _PARAMETER and isinstance(arguments[0], View):
            return arguments[0]
        if name == _TENSOR:
            storage, offset, shape, stride = arguments[:4]
            numbers = [offset, *shape, *stride]
            if not isinstance(storage, Storage) or len(shape) != len(stride):
                raise TypeError("tensor")
            if any(type(number) is not int or not 0 <= number < 2**63 for number in numbers):
                raise ValueError("tensor")
            return View(storage, offset, tuple(shape), tuple(stride))
        raise self._refuse("a call of something else than tensors and dictionaries")

    def _build(self) -> None:
        """Attributes of a dictionary (`_metadata` of a state dict) are of no use here."""
        target, _ = self._last(2)
        if not isinstance(target, dict):
            raise self._refuse("attributes of something else than a dictionary")
        self._stack.append(target)

    def _extend(self, values: list[Any]) -> None:
        if type(self._stack[-1]) is not list:
            raise TypeError("append")
        self._stack[-1].extend(values)

    def _update(self, values: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not dict or len(values) % 2:
            raise TypeError("items")
        for key, value in zip(values[::2], values[1::2], strict=True):
            if not isinstance(key, (str, int)):
                raise TypeError("key")
            target[key] = value
