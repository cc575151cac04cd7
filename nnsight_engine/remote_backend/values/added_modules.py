"""User modules added to a model (``model.sae = Autoencoder()``), which the server's model does not have.

They are sent with every trace and decoded before the blocks, which refer to them by name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch

from nnsight_engine.envoys.envoy import Envoy
from nnsight_engine.remote_backend.codecs import Codec, decode_blocks, encode_blocks
from nnsight_engine.remote_backend.values.object_references import Reference, reference_of
from nnsight_engine.serialization import DecodeError
from nnsight_engine.serialization.decoding.decoder import Resolve

_ADDED: Final = "added"
_NOTHING: Final = object()


def added_part(model: Envoy, codec: Codec) -> list[bytes]:
    added = model._root._added  # noqa: SLF001 - an envoy of ours
    if not added:
        return []
    paths = [f"{parent}.{name}" for parent, name in added]

    def reference(value: Any) -> Reference | None:
        found = reference_of(value, model, [])
        is_added = found is not None and any(f"{found[-1]}.".startswith(f"{path}.") for path in paths)
        return None if is_added else found

    modules = [(parent, name, module) for (parent, name), module in added.items()]
    return [encode_blocks(codec, [], {_ADDED: modules}, reference=reference)]


@contextlib.contextmanager
def attached(
    model: Envoy, parts: Sequence[bytes | memoryview], codec: str, resolve: Resolve
) -> Iterator[None]:
    """Attach a request's modules to a model's tree; restore the tree on exit."""
    before: list[_Before] = []
    known = model._root._by_module  # noqa: SLF001 - an envoy of ours
    by_module = dict(known)
    try:
        for part in parts:
            shared = decode_blocks(codec, part, resolve=resolve, trusted=True).shared
            for parent, name, module in _checked(shared.get(_ADDED)):
                envoy = _parent(resolve, parent)
                before.append(_Before(envoy, name))
                _add(envoy, name, module)
        yield
    finally:
        for one in reversed(before):
            one.restore()
        if before:
            known.clear()
            known.update(by_module)
            model._root.__dict__["_probes"] = None  # noqa: SLF001 - the same


class _Before:
    def __init__(self, envoy: Envoy, name: str) -> None:
        self._envoy = envoy
        self._class = type(envoy)
        self._name = name
        self._variable = vars(envoy).get(name, _NOTHING)
        self._children, self._names = [*envoy._children], [*envoy._names]  # noqa: SLF001 - an envoy of ours

    def restore(self) -> None:
        envoy = self._envoy
        # Adding the child may have replaced the class, to free the name.
        object.__setattr__(envoy, "__class__", self._class)
        envoy._children[:], envoy._names[:] = self._children, self._names  # noqa: SLF001 - an envoy of ours
        if self._variable is _NOTHING:
            vars(envoy).pop(self._name, None)
        else:
            vars(envoy)[self._name] = self._variable


def _checked(added: Any) -> list[tuple[str, str, torch.nn.Module]]:
    kinds = (str, str, torch.nn.Module)
    if not isinstance(added, list) or not all(
        isinstance(one, tuple) and len(one) == len(kinds) and all(map(isinstance, one, kinds))
        for one in added
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


__all__ = ["added_part", "attached"]
