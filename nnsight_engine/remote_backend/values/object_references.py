"""References to objects that both sides have of a transformers model, so that they are sent by name.

The client's model may have no weights, so modules and parameters are sent by name, too. Results name
locations in the model with ``place_of``, but there a saved parameter is an ordinary value.

The server's model lacks the modules that a user has added (``model.sae = Autoencoder()``). They are sent with
every trace and decoded before the blocks, which refer to them by name.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final, NoReturn

import torch

from nnsight_engine.envoys.architectures.named_points import PointGroup
from nnsight_engine.envoys.architectures.points import Points
from nnsight_engine.envoys.cache import Cache, CacheView, Entry
from nnsight_engine.envoys.envoy import Envoy
from nnsight_engine.envoys.operations import OperationEnvoy, SourceEnvoy
from nnsight_engine.interleaving.interleaver import Interleaver
from nnsight_engine.interleaving.shared_variables import Barrier
from nnsight_engine.remote_backend.codecs import Codec, decode_blocks, encode_blocks
from nnsight_engine.serialization import DecodeError, EncodeError
from nnsight_engine.serialization.graph import Resolve
from nnsight_engine.tracing.tracer import Tracer

Reference = tuple[str, ...]

HOME_CLASSES: Final = (Cache, CacheView, Entry)
"""Classes that results may contain in addition to data: they hold data and locations in the model."""


def reference_of(value: Any, model: Envoy, barriers: list[Barrier]) -> Reference | None:
    """Return the reference of an object that the engine has itself; None for objects that must be sent.

    An unknown barrier is appended. A part of another model raises an ``EncodeError``.
    """
    location = place_of(value, model)
    if location is not None:
        return location
    if isinstance(value, Barrier):
        number = next((index for index, barrier in enumerate(barriers) if barrier is value), len(barriers))
        if number == len(barriers):
            barriers.append(value)
        return ("barrier", str(number), str(value.participants))
    if isinstance(value, Tracer | Interleaver):
        return ("tracer",) if isinstance(value, Tracer) else ("interleaver",)
    root = model._root  # noqa: SLF001 - an envoy of ours
    if isinstance(value, torch.Tensor):
        return _tensor_of(value, root._module)  # noqa: SLF001 - the same
    tokenizer = root.__dict__.get("tokenizer")
    return ("tokenizer",) if tokenizer is not None and value is tokenizer else None


def place_of(value: Any, model: Envoy) -> Reference | None:
    """Return the reference of a location in the model, None for others; raises like ``reference_of``."""
    if isinstance(value, Envoy):
        if value._root is not model._root:  # noqa: SLF001 - envoys of ours
            _refuse_other(str(value.path))
        return ("envoy", str(value.path))
    if isinstance(value, Points | PointGroup):
        return _points_of(value, model)
    if isinstance(value, SourceEnvoy | OperationEnvoy):
        if value.interleaver is not model.interleaver:
            _refuse_other(str(value.path))
        return _operation_of(value, model)
    if isinstance(value, torch.nn.Module):
        envoy = model._root._by_module.get(id(value))  # noqa: SLF001 - an envoy of ours
        return None if envoy is None else ("module", str(envoy.path))
    return None


def _points_of(value: Points | PointGroup, model: Envoy) -> Reference:
    """Return the reference of all standard points of a model, or of a group of them by its prefix."""
    points = value if isinstance(value, Points) else value.__dict__["_points"]
    if points is not model._root.__dict__.get("_points"):  # noqa: SLF001 - an envoy of ours
        _refuse_other("points")
    return ("points",) if points is value else ("point", str(value.__dict__["_prefix"]))


def _operation_of(value: SourceEnvoy | OperationEnvoy, model: Envoy) -> Reference:
    """Return the path of the module that an operation is in, then the calls that lead to it."""
    path = str(value.path)
    modules = (str(envoy.path) for envoy in model._root._walk())  # noqa: SLF001 - an envoy of ours
    module = max(
        (module_path for module_path in modules if f"{path}.".startswith(f"{module_path}.")), key=len
    )
    calls = [call for call in path.removeprefix(module).split(".") if call]
    return ("source" if isinstance(value, SourceEnvoy) else "operation", module, *calls)


def _tensor_of(value: torch.Tensor, module: torch.nn.Module) -> Reference | None:
    """Return the name of a parameter or buffer of the model; None for values, which are sent."""
    if not isinstance(value, torch.nn.Parameter) and not value.is_meta:
        return None
    named_tensors = itertools.chain(module.named_parameters(), module.named_buffers())
    return next((("tensor", name) for name, tensor in named_tensors if tensor is value), None)


def _refuse_other(path: str) -> NoReturn:
    raise EncodeError(
        f"the block uses {path} of another model than the one it traces; the engine has that one alone. Save "
        "the other model's values in a trace of its own, and use them here"
    )


class ObjectReferences:
    """Resolves references within one trace; ``tracer`` is the object of that name in its blocks, if any."""

    def __init__(self, model: Envoy, tracer: Tracer | None = None) -> None:
        self._model = model
        self._tracer = tracer
        self._barriers: dict[str, Barrier] = {}

    def __call__(self, reference: Reference) -> Any:
        """Return the object for a reference; raise a ``LookupError`` if it names nothing here."""
        try:
            kind, *rest = reference
            return self._finders()[kind](*rest)
        except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
            raise LookupError(
                f"the message names {reference!r}, which this model lacks: {error}. The client's model must "
                "be the server's"
            ) from error

    def _finders(self) -> dict[str, Callable[..., Any]]:
        """Return how references of each kind are resolved, from the rest of the reference."""
        model, root, tracer = self._model, self._model._root, self._tracer  # noqa: SLF001 - an envoy of ours
        finders: dict[str, Callable[..., Any]] = {
            "envoy": self._envoy,
            "module": lambda path: self._envoy(path)._module,  # noqa: SLF001 - an envoy of ours
            "tensor": lambda name: _tensor_named(root._module, name),  # noqa: SLF001 - the same
            "source": partial(self._operation, "source"),
            "operation": partial(self._operation, "operation"),
            "points": lambda: root.__dict__["_points"],
            "point": lambda prefix: root.__dict__["_points"].group(prefix),  # noqa: PLW0108 - made when asked for
            "barrier": self._barrier,
            "interleaver": lambda: model.interleaver,
            "tokenizer": lambda: model.__dict__["tokenizer"],
        }
        return finders if tracer is None else {**finders, "tracer": lambda: tracer}

    def _barrier(self, number: str, participants: str) -> Barrier:
        if number not in self._barriers:
            self._barriers[number] = Barrier(self._model.interleaver, int(participants))
        return self._barriers[number]

    def _envoy(self, path: str) -> Envoy:
        """Return the envoy at a path; the root's path gives the model as it is traced, with its edits."""
        model = self._model
        if path == str(model.path):
            return model
        root = model._root  # noqa: SLF001 - an envoy of ours
        envoy = root.get(path)
        if not isinstance(envoy, Envoy):
            raise TypeError(f"{path} is no module")
        return envoy

    def _operation(self, kind: str, module: str, *calls: str) -> SourceEnvoy | OperationEnvoy:
        """Return the operation that calls within a module's source lead to, or with ``source`` its source."""
        operation: SourceEnvoy | OperationEnvoy = self._envoy(module).source
        for call in calls:
            source = operation.source if isinstance(operation, OperationEnvoy) else operation
            operation = source.operations[call]
        return operation.source if kind == "source" and isinstance(operation, OperationEnvoy) else operation


def _tensor_named(module: torch.nn.Module, name: str) -> torch.Tensor:
    owner, _, attribute = name.rpartition(".")
    tensor = getattr(module.get_submodule(owner), attribute)
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} is no tensor")
    return tensor


_ADDED: Final = "added"
_NOTHING: Final = object()


def added_part(model: Envoy, codec: Codec) -> list[bytes]:
    """Return the modules that the user has added, as one message; no message without any."""
    added = model._root._added  # noqa: SLF001 - an envoy of ours
    if not added:
        return []
    paths = [f"{parent}.{name}" for parent, name in added]

    def reference(value: Any) -> Reference | None:
        referred = reference_of(value, model, [])
        is_added = referred is not None and any(f"{referred[-1]}.".startswith(f"{path}.") for path in paths)
        return None if is_added else referred

    modules = [(parent, name, module) for (parent, name), module in added.items()]
    return [encode_blocks(codec, [], {_ADDED: modules}, reference=reference)]


@contextlib.contextmanager
def attached(
    model: Envoy, parts: Sequence[bytes | memoryview], codec: str, resolve: Resolve
) -> Iterator[None]:
    """Attach a request's modules to a model's tree; restore the tree on exit."""
    states: list[_Before] = []
    known = model._root._by_module  # noqa: SLF001 - an envoy of ours
    by_module = dict(known)
    try:
        for part in parts:
            shared = decode_blocks(codec, part, resolve=resolve, trusted=True).shared
            for parent, name, module in _checked(shared.get(_ADDED)):
                envoy = _parent(resolve, parent)
                states.append(_Before(envoy, name))
                _add(envoy, name, module)
        yield
    finally:
        for state in reversed(states):
            state.restore()
        if states:
            known.clear()
            known.update(by_module)
            model._root.__dict__["_probes"] = None  # noqa: SLF001 - the same


class _Before:
    def __init__(self, envoy: Envoy, name: str) -> None:
        """Remember what adding a child of this name to an envoy changes."""
        self._envoy = envoy
        self._class = type(envoy)
        self._name = name
        self._variable = vars(envoy).get(name, _NOTHING)
        self._children, self._names = [*envoy._children], [*envoy._names]  # noqa: SLF001 - an envoy of ours

    def restore(self) -> None:
        """Remove the child that was added, or put back what had its name."""
        envoy = self._envoy
        # Adding the child may have replaced the class, to free the name.
        object.__setattr__(envoy, "__class__", self._class)
        envoy._children[:], envoy._names[:] = self._children, self._names  # noqa: SLF001 - an envoy of ours
        if self._variable is _NOTHING:
            vars(envoy).pop(self._name, None)
        else:
            vars(envoy)[self._name] = self._variable


def _checked(added: Any) -> list[tuple[str, str, torch.nn.Module]]:
    """Return a message's added modules: the parent's path, the name and the module of each."""
    kinds = (str, str, torch.nn.Module)
    if not isinstance(added, list) or not all(
        isinstance(path, tuple) and len(path) == len(kinds) and all(map(isinstance, path, kinds))
        for path in added
    ):
        raise DecodeError("the trace is broken: modules are added with their place and their name")
    return added


def _add(envoy: Envoy, name: str, module: torch.nn.Module) -> None:
    try:
        envoy._add_envoy(module.to(envoy._root.device), name)  # noqa: SLF001 - an envoy of ours
    except Exception as error:  # a user's module may fail in any way
        raise DecodeError(f"the module {name!r} cannot be added to {envoy.path}: {error}") from error


def _parent(resolve: Resolve, path: str) -> Envoy:
    try:
        envoy = resolve(("envoy", path))
    except LookupError as error:
        raise DecodeError(str(error)) from error
    assert isinstance(envoy, Envoy)  # noqa: S101 - an ``envoy`` reference names no other type
    return envoy
