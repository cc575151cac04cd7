"""How a trace hears of module calls: a probe before each module's own call, for as long as the trace runs.

Torch lets an instance replace how it is called (``Module.compile`` uses the same slot). A probe in that slot
counts the call, looks whether a block waits for its input or output, and calls on. Nothing is registered on
a module outside a trace, so an untraced forward runs exactly as if the model were not wrapped; and since
every call is seen from the start, a block that asks too late is told so instead of getting a later call's
value. Torch's own hooks could not do that: on a module without hooks, one added during the call never runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from threading import get_ident
from typing import Any

import torch

from nnsight_engine.interleaving.interleaver import Interleaver

_SLOT = "_compiled_call_impl"


class Probes:
    """The probes of a tree of modules; installed while a trace runs."""

    def __init__(self, modules: Iterable[tuple[torch.nn.Module, str]], interleaver: Interleaver) -> None:
        """Prepare a probe for each module, which is known by its path."""
        self._probes: list[tuple[dict[str, Any], Callable[..., Any]]] = []
        self._replaced: list[tuple[dict[str, Any], Any]] = []
        for module, path in modules:
            self._probes.append((module.__dict__, _probe(module, path, interleaver)))

    def install(self) -> None:
        """Put every probe in place."""
        for attributes, probe in self._probes:
            if _SLOT in attributes:
                self._replaced.append((attributes, attributes[_SLOT]))
            attributes[_SLOT] = probe

    def remove(self) -> None:
        """Leave the modules as they were."""
        for attributes, _ in self._probes:
            attributes.pop(_SLOT, None)
        for attributes, before in self._replaced:
            attributes[_SLOT] = before
        self._replaced.clear()


def _probe(module: torch.nn.Module, path: str, interleaver: Interleaver) -> Callable[..., Any]:
    """Return what stands before ``module``'s call."""
    compiled = module.__dict__.get(_SLOT)
    call: Callable[..., Any] = compiled if compiled is not None else module._call_impl
    entrance, exit_ = f"{path}.input", f"{path}.output"
    calls, wanted = interleaver.calls, interleaver.wanted

    def probe(*args: Any, **kwargs: Any) -> Any:
        # Not the traced run: a block calls the module for itself, or another thread runs the model.
        if not interleaver.listening or get_ident() != interleaver.thread:
            return call(*args, **kwargs)
        number = calls.get(entrance, 0)
        if number > interleaver.step:
            interleaver.advance(entrance, number)
        if entrance in wanted:
            args, kwargs = interleaver.offer(entrance, number, (args, kwargs))
            calls[entrance] = number + 1
            output = interleaver.skip_value(path) if interleaver.skipped else call(*args, **kwargs)
        else:
            calls[entrance] = number + 1
            output = call(*args, **kwargs)
        if exit_ in wanted:
            output = interleaver.offer(exit_, number, output)
        calls[exit_] = calls.get(exit_, 0) + 1
        return output

    return probe
