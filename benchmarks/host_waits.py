"""Finds calls for which the host would wait for a GPU, on any device.

On a CPU nothing waits, and the memory of the host is that of the device. So a tensor counts as one of the
host if it was made there within the block: from numpy, by a factory that names no device, or from such
tensors. All others count as tensors of the device, and these calls wait:

- calls that hand numbers to Python or copy to the host's pageable memory;
- operators whose result has a size that the device computes, such as an index that is a mask;
- copies to the device of values that Python or the host has, such as ``torch.tensor([1], device=…)``, since
  pageable memory is copied synchronously. ``to_device`` and ``HostArena`` use pinned memory. The first use
  of a dictionary, which loads it, is not counted.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any, Final

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from nnsight_engine.features.weights_file import load_dictionary
from nnsight_engine.plans.step import cpu_executor
from nnsight_engine.plans.step.host_arena import HostArena, to_device

Found = Callable[[str], None]
"""Receives the name of a call that would wait, and the stack."""

_TENSOR: Final = torch.Tensor
_HANDS_OUT: Final = frozenset(
    getattr(_TENSOR, name)
    for name in (
        *("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__complex__", "__index__"),
        *("__array__", "__contains__", "__repr__", "__format__", "__reduce_ex__", "__deepcopy__"),
    )
)
"""Methods that hand a tensor's numbers to Python, or copy them to the host."""
_SIZED_BY_VALUES: Final = frozenset(
    {
        *("_local_scalar_dense", "is_nonzero", "equal", "allclose"),
        *("nonzero", "masked_select", "bincount"),
        *("_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive"),
    }
)
"""Operators that hand out numbers, or whose result has a size that depends on them."""
_INDEXING: Final = frozenset({"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"})
_FROM_VALUES: Final = frozenset({torch.tensor, torch.as_tensor, torch.asarray})
_FACTORIES: Final = _FROM_VALUES | {
    *(torch.empty, torch.zeros, torch.ones, torch.full, torch.arange, torch.linspace),
    *(torch.rand, torch.randn, torch.randint, torch.randperm, torch.eye, torch.scalar_tensor),
}
_ON_HOST: Final = "_is_on_host"
"""Attribute of tensors that the host has made."""
_UPLOAD: Final = frozenset({to_device.__code__})
_ALLOWED: Final = _UPLOAD | {
    HostArena.start_copy.__code__,
    load_dictionary.__code__,
    cpu_executor.executor.__code__,
}
"""Functions that copy through pinned memory, load something in its first step only, or run on CPUs only."""


@contextlib.contextmanager
def finding_waits(found: Found) -> Iterator[None]:
    """Call ``found`` where the block would wait for a GPU. Sees the block's own thread only."""
    with _Calls(found), _Operations(found):
        yield


class _Calls(TorchFunctionMode):
    def __init__(self, found: Found) -> None:
        super().__init__()
        self._found = found

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        kwargs = kwargs or {}
        if _call_waits(func, args, kwargs) and not _is_within(_ALLOWED):
            self._found(_described(func))
        result = func(*args, **kwargs)
        _note_place(result, is_on_host=_is_made_on_host(func, args, kwargs))
        return result


class _Operations(TorchDispatchMode):
    def __init__(self, found: Found) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's own constructor
        self._found = found

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        kwargs = kwargs or {}
        is_on_device = not _all_on_host(args, kwargs)
        if _operator_waits(func, args, kwargs) and is_on_device and not _is_within(_ALLOWED):
            self._found(_described(func))
        if torch.is_inference_mode_enabled():
            # There, operators that are made of others arrive whole.
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return func(*args, **kwargs)


def _call_waits(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    if func in _HANDS_OUT or func is _TENSOR.new_tensor:
        return not _is_on_host(args[0])
    if func in _FROM_VALUES:
        return kwargs.get("device") is not None
    if func is _TENSOR.to:
        return _may_move(args[0], [*args[1:], *kwargs.values()])
    if func is _TENSOR.copy_:
        return _is_on_host(args[0]) is not _is_on_host(_argument(args, kwargs, 1, "src"))
    is_index = func is _TENSOR.__getitem__ or func is _TENSOR.__setitem__
    return is_index and not _is_on_host(args[0]) and any(map(_is_from_host, _entries(args[1:])))


def _may_move(tensor: torch.Tensor, arguments: Sequence[Any]) -> bool:
    """Return whether ``to`` with these arguments copies between host and device, or names a device."""
    return any(
        _is_on_host(one) is not _is_on_host(tensor)
        if isinstance(one, torch.Tensor)
        else isinstance(one, str | torch.device)
        for one in arguments
    )


def _operator_waits(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    name = func.overloadpacket.__name__
    if name in _SIZED_BY_VALUES:
        return True
    if name in _INDEXING:
        indices = [one for one in args[1] if one is not None]
        return any(one.dtype in {torch.bool, torch.uint8} for one in indices)
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None
    if name == "isin":
        return _isin_sorts(args, kwargs)
    return False


def _isin_sorts(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether ``isin`` sorts, and therefore removes duplicates; torch's own rule."""
    elements, among = args[:2]
    if kwargs.get("assume_unique") or not (
        isinstance(elements, torch.Tensor) and isinstance(among, torch.Tensor)
    ):
        return False
    return among.numel() >= int(10 * elements.numel() ** 0.145)


def _entries(arguments: Sequence[Any]) -> Iterator[Any]:
    """Yield the entries of an index, and the value that is assigned there."""
    for one in arguments:
        yield from one if isinstance(one, tuple) else (one,)


def _is_from_host(entry: Any) -> bool:
    """Return whether an entry's numbers are on the host; a single number is no tensor there."""
    if isinstance(entry, torch.Tensor):
        return _is_on_host(entry) and entry.ndim > 0
    return isinstance(entry, list | range | np.ndarray)


def _is_made_on_host(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    if func is torch.ops.aten.lift_fresh.default:  # torch.from_numpy, the only one that arrives here
        return True
    if func in _FACTORIES:
        # vLLM's code for CPUs names no device for what lies on the GPU elsewhere.
        caller = sys._getframe(2).f_globals.get("__name__", "")  # noqa: SLF001 - the interpreter's own
        return kwargs.get("device") is None and not caller.startswith("vllm.")
    return _all_on_host(args, kwargs) and kwargs.get("device") is None and not _is_within(_UPLOAD)


def _all_on_host(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    tensors = list(_tensors((*args, *kwargs.values())))
    return bool(tensors) and all(map(_is_on_host, tensors))


def _tensors(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _is_on_host(value: Any) -> bool:
    return getattr(value, _ON_HOST, False) is True


def _note_place(result: Any, *, is_on_host: bool) -> None:
    for tensor in _tensors((result,)):
        if is_on_host or _is_on_host(tensor):
            setattr(tensor, _ON_HOST, is_on_host)


def _argument(args: Sequence[Any], kwargs: Mapping[str, Any], place: int, name: str) -> Any:
    return args[place] if len(args) > place else kwargs.get(name)


def _is_within(codes: frozenset[CodeType]) -> bool:
    """Return whether one of the functions runs."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - the interpreter's own
    while frame is not None:
        if frame.f_code in codes:
            return True
        frame = frame.f_back
    return False


def _described(func: Any) -> str:
    stack = "".join(traceback.format_stack(limit=14)[:-2])
    return f"{getattr(func, '__qualname__', func)} waits for the device\n{stack}"
