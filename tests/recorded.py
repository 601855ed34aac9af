"""What stands for CUDA graphs on a CPU: records the torch calls of a run and repeats them.

It is stricter than a device: work that waits (reads a value, copies from the host) is refused, what
was made outside a recording must still be alive and at its address when it is repeated, and what
was made inside is destroyed after every run, as other graphs would. Triton's interpreter is
recorded too. Imported by tests only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

WAITING = {
    torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.item, torch.Tensor.cpu,
    torch.Tensor.__bool__, torch.Tensor.__int__, torch.Tensor.__float__, torch.Tensor.__index__,
    torch.Tensor.nonzero, torch.nonzero, torch.masked_select, torch.unique,
    torch.tensor, torch.as_tensor, torch.from_numpy, torch.equal,
}  # fmt: skip
REFUSED = {
    "aten._local_scalar_dense.default", "aten.nonzero.default", "aten.lift_fresh.default",
    "aten.equal.default", "aten.masked_select.default", "aten.is_nonzero.default",
}  # fmt: skip


class Waits(RuntimeError):
    """Work that can't be captured: it waits for the device, or for the host."""


@dataclass(frozen=True, slots=True)
class _Outside:
    """A tensor that the recording did not make: only who made it keeps it alive."""

    storage: StorageWeakRef
    address: int
    like: tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int]

    @classmethod
    def of(cls, tensor: Tensor) -> _Outside:
        like = (tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())
        storage = tensor.untyped_storage()
        return cls(StorageWeakRef(storage), storage.data_ptr(), like)

    def tensor(self) -> Tensor:
        assert not self.storage.expired(), "a graph reads a tensor that is gone"
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        assert storage is not None and storage.data_ptr() == self.address, "a tensor has moved"
        dtype, size, stride, offset = self.like
        return torch.empty(0, dtype=dtype).set_(storage, offset, size, stride)


def _opaque(tensor: Tensor) -> bool:
    return tensor.layout is torch._mkldnn


class _Refusing(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in WAITING:
            raise Waits(f"{func.__name__} can't be part of a graph")
        return func(*args, **(kwargs or {}))


class _Log(TorchDispatchMode):
    """The calls of one run."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable[..., Any], Any, Any, Any]] = []
        self._own: dict[int, Tensor] = {}  # by storage
        self._busy = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._busy:
            return func(*args, **kwargs)
        if str(func) in REFUSED:
            raise Waits(f"{func} can't be part of a graph")
        held = tree_map(self._hold, (args, kwargs))
        given = {_place(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **kwargs)
        for made in tree_leaves(out):
            if isinstance(made, Tensor) and not _opaque(made) and _place(made) not in given:
                self._own.setdefault(_place(made), made)
        self.calls.append((func, *held, tree_map(self._hold, out)))
        return out

    def launch(self, run: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """A program of Triton's."""
        held = tree_map(self._hold, (args, kwargs))
        self._busy = True
        try:
            run(*args, **kwargs)
        finally:
            self._busy = False
        self.calls.append((run, *held, None))

    def _hold(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or _opaque(value) or _place(value) in self._own:
            return value
        return _Outside.of(value)

    def replay(self) -> None:
        for func, args, kwargs, out in self.calls:
            given, named = tree_map(_back, (args, kwargs))
            made = func(*given, **named)
            if out is None:
                continue
            for old, new in zip(tree_leaves(out), tree_leaves(made), strict=True):
                kept = _back(old)
                if isinstance(kept, Tensor) and not _opaque(kept) and _place(kept) != _place(new):
                    kept.copy_(new)
        self.destroy()

    def destroy(self) -> None:
        """As if other graphs had used the memory of this one."""
        for tensor in self._own.values():
            whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
            whole.fill_(0x7F)


def _place(tensor: Tensor) -> int:
    return 0 if _opaque(tensor) else tensor.untyped_storage()._cdata


def _back(value: Any) -> Any:
    return value.tensor() if isinstance(value, _Outside) else value


@contextmanager
def _interpreter(log: _Log) -> Iterator[None]:
    """Launches in Triton's interpreter go through the log."""
    try:
        from triton.runtime.interpreter import GridExecutor
    except ImportError:
        yield
        return
    whole = GridExecutor.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        log.launch(lambda *a, **k: whole(self, *a, **k), args, kwargs)

    GridExecutor.__call__ = call
    try:
        yield
    finally:
        GridExecutor.__call__ = whole


class Recorder:
    """A `Capture` for CPUs. replays: how often each recording ran, in order of recording."""

    def __init__(self) -> None:
        self.replays: list[int] = []

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """See `kernels.graphs.Capture`."""
        work()
        log = _Log()
        with _interpreter(log), _Refusing(), log:
            work()
        log.destroy()
        number = len(self.replays)
        self.replays.append(0)

        def replay() -> None:
            self.replays[number] += 1
            log.replay()

        return replay
