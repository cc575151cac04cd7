"""Detection of modules inside a ``torch.compile`` result, which are not called: errors name this cause."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nnsight_engine.interleaving.events import MissedProviderError

if TYPE_CHECKING:
    from nnsight_engine.envoys.envoy import Envoy


def is_compiled(module: torch.nn.Module) -> bool:
    """Return whether a module was compiled by ``compile()``, or is a result of ``torch.compile``."""
    return module.__dict__.get("_compiled_call_impl") is not None or "_orig_mod" in module._modules


def compiled_around(root: Envoy, path: str) -> str | None:
    for envoy in root._walk():
        outer = str(envoy.path)
        if is_compiled(envoy._module) and path.startswith(f"{outer}."):
            return outer
    return None


def explain_missed(error: MissedProviderError, root: Envoy) -> None:
    """Extend the error for a value that never arrived, if its module is compiled; called after the run."""
    path = (error.provider or "").rpartition(".")[0]
    outer = compiled_around(root, path) if path else None
    if outer is not None:
        message = (
            f"{error} It is inside `{outer}`, which torch.compile has compiled: compiled code does not call "
            "the modules in it. Wrap the model before it is compiled (`NNsight(compiled._orig_mod)`), or run "
            "the trace under `with torch.compiler.set_stance('force_eager'):`."
        )
        error.args = (message,)
