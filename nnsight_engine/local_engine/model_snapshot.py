"""Snapshot of a loaded model, to restore it after each trace.

Changes to Python objects are undone: the dicts, lists and sets that are reachable are copied, compared by
identity, and restored. Changed weights cannot be restored, only detected. ``is_suspect`` is cheap and is
checked before a trace's answer is sent; ``restore`` reads all weights after it. Neither protects against
malicious code, which runs in the same process.

Weights are compared by checksums: a second copy would cost as much memory as the model, and torch's version
counters miss writes through ``.data``. Bytes are summed as 64-bit integers by rows and by columns; swapped
rows change the order of the row sums. Small tensors that are not weights, such as buffers that a model writes
itself, are copied and restored.
"""

from __future__ import annotations

import builtins
import operator
from collections.abc import Callable, Collection, Iterable, Iterator
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn.modules import module as torch_modules
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

from nnsight_engine.envoys.envoy import Envoy

if TYPE_CHECKING:
    from nnsight_engine.modeling.language import LanguageModel

_WORD_BYTES = 8
_NUM_COLUMNS = 256
_MAX_KEPT_BYTES = 2**20
"""The maximum size of a tensor that is copied, so that it can be restored."""


class TensorChecksums:
    """The state of tensors: copies of small ones, checksums of weights; see the module."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._tensors = [_TensorState(tensor) for tensor in tensors]
        self._summed = [state for state in self._tensors if state.kept is None]
        self._sums = self._checksums()

    @property
    def is_written(self) -> bool:
        """Whether a weight was written to since the last call, by torch's version counters; cheap."""
        return sum(state.is_written() for state in self._summed) > 0

    def restore(self) -> bool:
        """Restore the copied tensors; return False if any content or graph has changed for good."""
        if not all(state.tensor.is_leaf for state in self._tensors):
            return False  # it is part of an autograd graph
        for state in self._tensors:
            state.restore()
        checksums = self._checksums()
        return len(checksums) == len(self._sums) and all(map(torch.equal, checksums, self._sums))

    def _checksums(self) -> list[torch.Tensor]:
        """Return the checksums of all weights, those of one device in one tensor."""
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        seen: set[int] = set()
        for state in self._summed:
            for tensor in _plain(state.tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in seen:  # weights may be tied
                    seen.add(storage.data_ptr())
                    by_device.setdefault(tensor.device, []).extend(_sums(storage))
        return [torch.cat(sums) for sums in by_device.values()]


class _TensorState:
    """A tensor's memory, flags and version; ``kept`` is a copy of the content, None for a weight."""

    def __init__(self, tensor: torch.Tensor) -> None:
        """Note the tensor's state; copy its content if it is small and no weight."""
        self.tensor = tensor
        self._memory = tensor.detach()  # keeps it allocated
        self._needs_grad = tensor.requires_grad
        self._version = tensor._version  # noqa: SLF001 - has no public name
        is_kept = not isinstance(tensor, torch.nn.Parameter) and tensor.nbytes <= _MAX_KEPT_BYTES
        self.kept = tensor.detach().clone() if is_kept and type(tensor) is torch.Tensor else None

    def is_written(self) -> bool:
        version, self._version = self._version, self.tensor._version  # noqa: SLF001 - has no public name
        return version != self._version

    def restore(self) -> None:
        """Restore the tensor's memory, flags and hooks, and the content if it was copied."""
        tensor, memory = self.tensor, self._memory
        if not _is_same_memory(tensor, memory):
            tensor.data = memory
        tensor.requires_grad_(self._needs_grad)
        tensor.grad = None
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            if hooks := getattr(tensor, name, None):
                hooks.clear()
        if self.kept is not None and not _is_equal(memory, self.kept):
            memory.copy_(self.kept)


def _is_same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.data_ptr() == b.data_ptr()
        and a.shape == b.shape
        and a.stride() == b.stride()
        and a.dtype == b.dtype
        and a.device == b.device
    )


def _is_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compare bytes, since NaN equals nothing."""
    return torch.equal(
        a.reshape(-1).contiguous().view(torch.uint8), b.reshape(-1).contiguous().view(torch.uint8)
    )


def _plain(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors that own memory: a tensor itself, or the parts of a wrapper subclass."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor
        return
    names, _ = flatten()
    for name in names:
        yield from _plain(getattr(tensor, name))


def _sums(storage: torch.UntypedStorage) -> list[torch.Tensor]:
    """Return the sums of memory by columns and by rows, as 64-bit integers, and the bytes left over."""
    data = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    num_rows = data.numel() // (_WORD_BYTES * _NUM_COLUMNS)
    end = num_rows * _WORD_BYTES * _NUM_COLUMNS
    table = data[:end].view(torch.int64).view(num_rows, _NUM_COLUMNS)
    return [table.sum(0), table.sum(1), data[end:].to(torch.int64)]


_OBJECTS: Final = (
    torch.Tensor,
    torch.nn.Module,
    Envoy,
    PreTrainedConfig,
    GenerationConfig,
    PreTrainedTokenizerBase,
)
_DEFINITIONS: Final = (FunctionType, BuiltinFunctionType, type, staticmethod, classmethod, property)
_MADE_LATER: Final = frozenset(
    {"__annotations__", "__doc__", "__weakref__", "__dict__", "_abc_impl", "__slotnames__"}
)


class AttributeSnapshot:
    """The attributes of all objects that are reachable from one, and the content of containers."""

    def __init__(self, root: Any) -> None:
        """Record all objects and containers that are reachable from ``root``."""
        self.objects: list[Any] = []
        self.tensors: list[torch.Tensor] = []
        self._containers: list[_Container] = []
        self._kinds: list[tuple[Any, type, dict[str, Any]]] = []
        self._seen: dict[int, Any] = {}
        todo = [root]
        while todo:
            value = todo.pop()
            if id(value) not in self._seen:
                todo.extend(self._record(value))

    def restore(self) -> bool:
        """Restore the snapshot; return whether anything had changed."""
        for value, kind, attributes in self._kinds:
            if type(value) is not kind:
                object.__setattr__(value, "__class__", kind)
            if value.__dict__ is not attributes:
                object.__setattr__(value, "__dict__", attributes)
        return sum(container.restore() for container in self._containers) > 0

    def _record(self, value: Any) -> Iterable[Any]:
        """Record an object; return what it refers to, to be recorded next."""
        referents: list[Any]
        if isinstance(value, dict | list | set):
            self._containers.append(_Container(value))
            referents = [*(value.values() if isinstance(value, dict) else value)]
        elif isinstance(value, tuple):
            referents = [*value]
        elif isinstance(value, _OBJECTS):
            of_kind: list[Any] = self.tensors if isinstance(value, torch.Tensor) else self.objects
            of_kind.append(value)
            self._kinds.append((value, type(value), vars(value)))
            referents = [vars(value)]
        else:
            return ()
        self._seen[id(value)] = value  # the reference keeps its id valid
        return referents


class Definitions:
    """The methods of classes and their bases, and what the modules that define them contain."""

    def __init__(self, classes: Iterable[type], modules: Iterable[ModuleType] = ()) -> None:
        """Note what the classes, their bases, the modules of these and ``modules`` define."""
        bases = {base for cls in classes for base in cls.__mro__ if base is not object}
        self._classes = [(cls, dict(vars(cls))) for cls in bases]
        # Found through a function that the class defines itself, so that no module has to be looked up by
        # name.
        spaces = {id(space): space for cls in bases for space in _namespaces(cls)}
        spaces.update((id(vars(module)), vars(module)) for module in modules)
        self._spaces = [
            (space, {name: value for name, value in space.items() if isinstance(value, _DEFINITIONS)})
            for space in spaces.values()
        ]

    def restore(self) -> None:
        """Restore functions and classes; other variables of modules stay as they are."""
        for cls, known in self._classes:
            attributes = vars(cls)
            if not (
                len(attributes) == len(known) and all(map(operator.is_, attributes.values(), known.values()))
            ):
                _restore_class(cls, known)
        for space, known in self._spaces:
            if not all(map(operator.is_, map(space.get, known), known.values())):
                space.update(known)


def _namespaces(cls: type) -> Iterator[dict[str, Any]]:
    for value in vars(cls).values():
        if isinstance(value, FunctionType) and value.__module__ == cls.__module__:
            yield value.__globals__


def _restore_class(cls: type, known: dict[str, Any]) -> None:
    """Set a class's attributes to the known ones, except those that Python adds later."""
    attributes = dict(vars(cls))
    for name in attributes.keys() - known.keys() - _MADE_LATER:
        delattr(cls, name)
    for name, value in known.items():
        if attributes.get(name) is not value and name not in _MADE_LATER:
            setattr(cls, name, value)


class _Container:
    """A dict, a list or a set, and what it held."""

    def __init__(self, container: dict[Any, Any] | list[Any] | set[Any]) -> None:
        self._container = container
        kind = next(kind for kind in (dict, list, set) if isinstance(container, kind))
        self._content: Any = kind(container)

    def restore(self) -> bool:
        """Restore the content; return whether it had changed."""
        container, content = self._container, self._content
        is_same = container == content if isinstance(container, set) else _has_same_items(container, content)
        if isinstance(container, dict):
            is_same = is_same and _has_same_items(container.values(), content.values())
        if not is_same:
            container.clear()
            add: Callable[[Any], None] = container.extend if isinstance(container, list) else container.update
            add(content)
        return not is_same


def _has_same_items(a: Collection[Any], b: Collection[Any]) -> bool:
    return len(a) == len(b) and all(map(operator.is_, a, b))


_PROBES = "_probes"


class ModelSnapshot:
    """A model as it was loaded, with the code and settings that its runs use."""

    def __init__(self, model: LanguageModel) -> None:
        """Take the snapshot of a model without its probes, which the next run creates again."""
        self._model = model
        vars(model)[_PROBES] = None
        global_hooks = [value for name, value in vars(torch_modules).items() if name.startswith("_global_")]
        self._attributes = AttributeSnapshot([model, global_hooks])
        self._definitions = Definitions(
            {type(model_object) for model_object in self._attributes.objects} | {torch.Tensor},
            (builtins, torch, torch.nn.functional),
        )
        self._contents = TensorChecksums(self._attributes.tensors)
        self._tokens = _tokens(model.tokenizer)

    @property
    def is_suspect(self) -> bool:
        return self._contents.is_written

    def restore(self) -> bool:
        """Undo the changes of a trace; return False if something cannot be undone."""
        self._definitions.restore()
        model = self._model
        model._drop_inspection_state()  # noqa: SLF001 - an envoy of ours
        attributes = vars(model)
        probes, attributes[_PROBES] = attributes[_PROBES], None
        if not self._attributes.restore():
            attributes[_PROBES] = probes  # expensive to compute, and the tree has not changed
        return self._contents.restore() and _tokens(model.tokenizer) == self._tokens


def _tokens(tokenizer: Any) -> list[Any]:
    """Return the state that determines how text is tokenized, where it is not held by Python objects."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return []
    parts = (backend.normalizer, backend.pre_tokenizer, backend.post_processor, backend.decoder)
    states = [None if part is None else part.__getstate__() for part in parts]
    added = {number: str(token) for number, token in backend.get_added_tokens_decoder().items()}
    return [backend.get_vocab_size(), added, states]
