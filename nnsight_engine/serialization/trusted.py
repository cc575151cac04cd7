"""Traces as pickles, for readers whose operator trusts the sender fully.

cloudpickle accepts values that the wire format refuses: functions without source, sparse tensors, C objects.
Unpickling runs arbitrary code of the sender, even before a block runs: only for senders that are configured
as trusted, and results are never sent as pickles. No other module of this package imports pickle or similar
formats. Functions are sent as byte code, which only the same Python version reads.
"""

from __future__ import annotations

import builtins
import importlib
import io
import pickle
import struct
import sys
import threading
from collections.abc import Collection, Mapping, Sequence
from types import CellType, CodeType, FunctionType
from typing import Any, Final

import cloudpickle
import torch

from nnsight_engine.core.closure_cells import UNBOUND, content
from nnsight_engine.serialization.blocks import SentBlock, block_of, block_source
from nnsight_engine.serialization.data import unsendable
from nnsight_engine.serialization.graph import Reference, Resolve
from nnsight_engine.serialization.limits import DecodeError, EncodeError, MessageLimits
from nnsight_engine.serialization.scopes import bound_globals
from nnsight_engine.serialization.source.fragments import SourceFragment
from nnsight_engine.serialization.source.import_resolution import is_importable
from nnsight_engine.serialization.wire import DEFAULT_LIMITS, ReceivedTrace, decode, encode
from nnsight_engine.tracing.loaded_code import SentFile
from nnsight_engine.tracing.tracer import Info

MAGIC: Final = b"NNSP"
VERSION: Final = 1
_HEAD: Final = struct.Struct("<4sBBBx")
"""Magic, format version, and the major and minor version of the sender's Python."""
_PROTOCOL: Final = 5
_HERE: Final = (sys.version_info.major, sys.version_info.minor)
_NUMBERED: Final = {
    ("cloudpickle.cloudpickle", "_make_skeleton_class"): 4,
    ("cloudpickle.cloudpickle", "_make_skeleton_enum"): 5,
    ("cloudpickle.cloudpickle", "_make_typevar"): 5,
}
"""cloudpickle's makers of classes by value, with the index of the argument that numbers the class."""
_NOT_ASKED: Final = frozenset({str, int, float, bool, bytes, type(None)})
_OF_A_NAMESPACE: Final = ("__package__", "__name__", "__path__", "__file__")
_one_at_a_time = threading.Lock()
"""The set of modules that are pickled by value is global state of cloudpickle."""


def encode_trace_pickled(
    blocks: Sequence[SentBlock],
    shared: Mapping[str, Any] | None = None,
    *,
    reference: Reference | None = None,
    saved: Collection[int] = (),
    limits: MessageLimits = DEFAULT_LIMITS,
) -> bytes:
    """Return blocks as a pickle, see ``encode_trace``; errors name the variable if it can be determined."""
    with _one_at_a_time:
        try:
            data = _pickled((list(blocks), dict(shared or {})), reference, saved)
        except Exception as error:
            raise EncodeError(_culprit(blocks, shared or {}, reference, error)) from error
    if len(data) > limits.max_bytes:
        raise EncodeError(
            f"the message would have {len(data):,} bytes and may have {limits.max_bytes:,}; send less at once"
        )
    return data


def decode_trace_pickled(
    data: bytes | bytearray | memoryview,
    *,
    resolve: Resolve | None = None,
    limits: MessageLimits = DEFAULT_LIMITS,
) -> ReceivedTrace:
    """Return the compiled blocks of a pickle. Runs arbitrary code of its sender."""
    view = memoryview(data).cast("B")
    if len(view) < _HEAD.size or bytes(view[: len(MAGIC)]) != MAGIC:
        raise DecodeError(f"these {len(view):,} bytes are no pickled trace: one begins with {MAGIC!r}")
    if len(view) > limits.max_bytes:
        raise DecodeError(f"the message has {len(view):,} bytes and may have {limits.max_bytes:,}")
    _, version, major, minor = _HEAD.unpack_from(view)
    if version != VERSION:
        raise DecodeError(f"the pickled trace has version {version}, and this side reads version {VERSION}")
    try:
        unpickler = _Unpickler(io.BytesIO(view[_HEAD.size :]), resolve)
        blocks, shared = unpickler.load()
        marked = unpickler.load()
    except DecodeError:
        raise
    except (Exception, RecursionError) as error:
        raise DecodeError(
            f"the pickled trace of Python {major}.{minor} cannot be read by Python {_HERE[0]}.{_HERE[1]}: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not all(isinstance(block, Info) for block in blocks):
        raise DecodeError("the message holds a block that is none")
    return ReceivedTrace(list(blocks), dict(shared), list(marked))


def _pickled(value: Any, reference: Reference | None, saved: Collection[int]) -> bytes:
    """Return two pickles behind a head: of a value, and of the list of the saved objects in it."""
    file = io.BytesIO()
    file.write(_HEAD.pack(MAGIC, VERSION, *_HERE))
    pickler = _Pickler(file, reference, saved)
    try:
        pickler.dump(value)
        pickler.dump(list(pickler.marked.values()))
    finally:
        pickler.close()
    return file.getvalue()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc] # untyped
    def __init__(self, file: io.BytesIO, reference: Reference | None, saved: Collection[int]) -> None:
        """``marked`` gets the saved objects; ``_shells`` are cells that the state of their owner fills."""
        super().__init__(file, protocol=_PROTOCOL)
        self.marked: dict[int, Any] = {}
        self._reference = reference
        self._saved = saved
        self._shells: dict[int, CellType] = {}
        self._seen: set[str] = set()
        self._by_value: list[Any] = []

    def close(self) -> None:
        """Revert the changes to cloudpickle's global state."""
        for module in self._by_value:
            cloudpickle.unregister_pickle_by_value(module)

    def persistent_id(self, value: Any) -> tuple[str, ...] | None:
        """Return the name of an object that the other side has, None for others; note saved ones."""
        if type(value) in _NOT_ASKED:
            return None
        if id(value) in self._saved:
            self.marked[id(value)] = value
        return None if self._reference is None else self._reference(value)

    def reducer_override(self, value: Any) -> Any:
        """Return how to pickle blocks, cells, tensors and code here; cloudpickle's way for the rest."""
        kind = type(value)
        if kind is SentBlock:
            return self._block(value)
        if kind is CellType:
            return self._cell(value)
        if isinstance(value, torch.Tensor) and unsendable(value) is None:
            return decode, (encode(value),)
        if kind is CodeType:
            return _code, (_HERE, self.dispatch_table[CodeType](value)[1])
        if isinstance(value, (type, FunctionType)):
            self._decide(value.__module__)
        reduced = super().reducer_override(value)
        by_value = kind is FunctionType and isinstance(reduced, tuple)
        return self._on_own_cells(value, reduced) if by_value else reduced

    def _decide(self, name: Any) -> None:
        """Have cloudpickle send definitions of a module by value if the other side cannot import it."""
        if name in self._seen or not isinstance(name, str):
            return
        self._seen.add(name)
        module = sys.modules.get(name)
        by_value = cloudpickle.list_registry_pickle_by_value()
        if module is not None and name not in by_value and not is_importable(name):
            cloudpickle.register_pickle_by_value(module)
            self._by_value.append(module)

    def _cell(self, cell: CellType) -> tuple[Any, ...]:
        if id(cell) in self._shells:  # filled by its owner, to which its contents may refer back
            return CellType, ()
        return CellType, (), _contents_of([cell]), None, None, _fill_cell

    def _shell(self, cell: CellType) -> CellType:
        self._shells[id(cell)] = cell
        return cell

    def _on_own_cells(self, function: FunctionType, reduced: tuple[Any, ...]) -> tuple[Any, ...]:
        """Keep the function's own cells, which cloudpickle would copy, as others may share the variables."""
        make, (*args, _), (state, slots), _, _, restore = reduced
        cells = tuple(map(self._shell, function.__closure__ or ()))
        state_parts = (restore, (state, {**slots, "__closure__": None}), cells, _contents_of(cells))
        return make, (*args, cells or None), state_parts, None, None, _fill_function

    def _block(self, sent: SentBlock) -> tuple[Any, ...]:
        """Return how to pickle a block: what it is compiled from, then cells and globals."""
        source = block_source(sent.info.block)
        first_argument, globals_ = sent.info.block.context.first_argument, sent.info.globals_
        cells = {name: self._shell(cell) for name, cell in sent.variables(source.variables).items()}
        module, namespace = str(globals_.get("__name__", "__main__")), None
        if not is_importable(module):
            # Shared with the module's functions, to which cloudpickle gives the same namespace.
            namespace = self.globals_ref.setdefault(id(globals_), {})
            if not namespace:
                namespace.update({key: globals_[key] for key in _OF_A_NAMESPACE if key in globals_})
        origin = (source.fragment, source.item, first_argument)
        names = [name for name in source.global_names if name not in sent.left_out]
        state_parts = (tuple(cells.values()), _contents_of(cells.values()), bound_globals(globals_, names))
        return _block, (module, namespace, origin, cells), state_parts, None, None, _fill_block


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, resolve: Resolve | None) -> None:
        super().__init__(file)
        self._resolve = resolve

    def find_class(self, module: str, name: str) -> Any:
        # A class by value would replace the methods of the class that has its number: of the sender's own
        # where the sender is in this process, and of one that an earlier trace is still using.
        value, index = super().find_class(module, name), _NUMBERED.get((module, name))
        return value if index is None else lambda *parts: value(*parts[:index], None, *parts[index + 1 :])

    def persistent_load(self, pid: Any) -> Any:
        if self._resolve is None:
            raise DecodeError("the message refers to something of this side, which it cannot resolve here")
        return self._resolve(pid)


def _contents_of(cells: Collection[CellType]) -> list[tuple[Any, ...]]:
    """Return the contents of cells: a tuple of one item each, empty if the variable is unbound."""
    return [() if content(cell) is UNBOUND else (content(cell),) for cell in cells]


def _culprit(
    blocks: Sequence[SentBlock], shared: Mapping[str, Any], reference: Reference | None, error: Exception
) -> str:
    """Return the error's text with the variable that cannot be pickled, found by pickling each alone."""
    candidates = [(f"shared value `{name}`", value) for name, value in shared.items()]
    for number, block in enumerate(blocks):
        candidates += [
            (f"block {number}, variable `{name}`", content(cell))
            for name, cell in block.cells.items()
            if content(cell) is not UNBOUND
        ]
    for label, value in candidates:
        try:
            _pickled(value, reference, ())
        except Exception as cause:  # noqa: BLE001 - the object's own code may raise anything
            return f"{label} cannot be sent: it is of type {type(value).__qualname__}; {cause}"
    return f"the trace cannot be sent: {type(error).__name__}: {error}"


# Functions that a pickle calls by name on the other side.


def _code(version: tuple[int, int], args: tuple[Any, ...]) -> CodeType:
    """Return a function's code from the arguments of ``CodeType``; DecodeError for another Python's."""
    if version != _HERE:
        raise DecodeError(
            f"a function was sent as code of Python {version[0]}.{version[1]}, and this side runs Python "
            f"{_HERE[0]}.{_HERE[1]}, which reads no such code: use the codec 'wire', which sends source"
        )
    code = CodeType(*args)
    return code.replace(co_filename=SentFile(code.co_filename))


def _fill_cell(cell: CellType, contents: list[tuple[Any, ...]]) -> None:
    _fill([cell], contents)


def _fill(cells: Collection[CellType], all_contents: list[tuple[Any, ...]]) -> None:
    for cell, contents in zip(cells, all_contents, strict=True):
        if contents:
            (cell.cell_contents,) = contents


def _fill_function(function: FunctionType, parts: tuple[Any, ...]) -> None:
    restore, state, cells, contents = parts
    restore(function, state)
    _fill(cells, contents)


def _block(
    module: str,
    namespace: dict[str, Any] | None,
    origin: tuple[tuple[Any, ...], int, str | None],
    cells: dict[str, CellType],
) -> Info:
    """Compile a block in its module, the installed one if ``namespace`` is None; see ``_Pickler._block``."""
    fields, item, first_argument = origin
    block = block_of(SourceFragment(*fields), item, first_argument, frozenset(cells))
    if namespace is None:
        namespace = vars(importlib.import_module(module))
    namespace.setdefault("__builtins__", builtins)
    return Info(block, cells, None, namespace)


def _fill_block(info: Info, parts: tuple[Any, ...]) -> None:
    cells, contents, globals_ = parts
    _fill(cells, contents)
    info.globals_.update(globals_)
