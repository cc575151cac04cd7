"""Probes: wrappers of module calls, installed while a trace runs, through which it observes every call.

They use the slot in which torch lets an instance override how it is called (as ``Module.compile`` does), so
an untraced forward runs exactly as if the model were not wrapped. Since every call is counted from the start,
a request that is too late is an error instead of a later call's value. Torch's own hooks could not ensure
that: on a module without hooks, one added during the call never runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from threading import get_ident
from typing import Any

import torch

from nnsight_engine.interleaving.interleaver import Interleaver

_SLOT = "_compiled_call_impl"


class Probes:
    """The probes of a tree of modules; installed while a trace runs.

    A module may be in several trees. Within a thread their traces nest, and the inner trace's probes call
    those of the outer. A trace in another thread on any of the modules blocks until they are removed.
    """

    def __init__(
        self,
        modules: Iterable[tuple[torch.nn.Module, str]],
        interleaver: Interleaver,
        *,
        calls_forward: Callable[[torch.nn.Module], bool] = lambda _: False,
    ) -> None:
        """Create the probes; ``calls_forward``: whether a class bypasses torch's slot."""
        self._interleaver = interleaver
        self._probes = [
            (module.__dict__, slot, _probe(path, interleaver, call), path)
            for module, path in modules
            for slot, call in [
                ("forward", module.forward) if calls_forward(module) else (_SLOT, module._call_impl)
            ]
        ]
        self._modules = {id(attributes) for attributes, _, _, _ in self._probes}
        self._replaced: list[tuple[dict[str, Any], str, Any]] = []

    def install(self) -> None:
        """Install all probes, once no other thread has probes on any of the modules."""
        with _changed:
            if _installed:
                _changed.wait_for(self._is_free)
            _installed.append((get_ident(), self))
            for attributes, slot, probe, path in self._probes:
                if slot in attributes:
                    attribute = attributes[slot]
                    self._replaced.append((attributes, slot, attribute))
                    attributes[slot] = (
                        probe if attribute is None else _probe(path, self._interleaver, attribute)
                    )
                else:
                    attributes[slot] = probe

    def remove(self) -> None:
        """Restore the modules' slots, and wake traces of other threads that wait for the modules."""
        with _changed:
            for attributes, slot, _, _ in self._probes:
                attributes.pop(slot, None)
            for attributes, slot, attribute in self._replaced:
                attributes[slot] = attribute
            self._replaced.clear()
            _installed.remove((get_ident(), self))
            _changed.notify_all()

    def _is_free(self) -> bool:
        me = get_ident()
        return all(thread == me or self._modules.isdisjoint(probes._modules) for thread, probes in _installed)


_changed = threading.Condition()
_installed: list[tuple[int, Probes]] = []
"""Installed probes with their threads; per process, since a module has a single slot."""


def _probe(path: str, interleaver: Interleaver, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a wrapper of a module's ``call`` that counts calls and serves their values to waiting blocks."""
    entrance, exit_ = f"{path}.input", f"{path}.output"
    calls, wanted = interleaver.calls, interleaver.wanted

    def probe(*args: Any, **kwargs: Any) -> Any:
        # Not the traced run: a block calls the module itself, or another thread runs the model.
        if get_ident() != interleaver.listener:
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
            output = call(*args, **kwargs) if kwargs else call(*args)
        if exit_ in wanted:
            output = interleaver.offer(exit_, number, output)
        calls[exit_] = number + 1
        return output

    return probe
