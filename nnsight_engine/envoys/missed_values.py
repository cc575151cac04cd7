"""Values that never arrive, and the reasons: for errors, and for the warning about caches when a trace ends.

Modules inside a ``torch.compile`` result are not called; errors name this cause.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

import torch

from nnsight_engine.interleaving.events import MissedProviderError

if TYPE_CHECKING:
    from nnsight_engine.envoys.cache import Cache
    from nnsight_engine.envoys.envoy import Envoy
    from nnsight_engine.interleaving.interleaver import Interleaver


def is_compiled(module: torch.nn.Module) -> bool:
    """Return whether a module was compiled by ``compile()``, or is a result of ``torch.compile``."""
    return module.__dict__.get("_compiled_call_impl") is not None or "_orig_mod" in module._modules


def compiled_around(root: Envoy, path: str) -> str | None:
    """Return the path of the compiled module that ``path`` is inside of; None if there is none."""
    for envoy in root._walk():
        outer_path = str(envoy.path)
        if is_compiled(envoy._module) and path.startswith(f"{outer_path}."):
            return outer_path
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


_MAX_NAMED: Final = 5
_COMPILED: Final = (
    "compiled by torch.compile: modules in it are not called one by one; wrap the model before it is compiled"
)


class CacheMisses:
    """What a cache was asked for and did not get, with the reasons; created together with the cache."""

    def __init__(
        self,
        cache: Cache,
        model: Envoy,
        modules: Sequence[Envoy | str] | None,
        keys: Sequence[str],
        interleaver: Interleaver,
    ) -> None:
        """Note what the cache is to have, of all modules if None, and what of it has run already."""
        self._interleaver = interleaver
        envoys = {str(envoy.path): envoy for envoy in model._walk()}
        named_paths = (
            []
            if modules is None
            else [module if isinstance(module, str) else str(module.path) for module in modules]
        )
        self._cache = cache
        self._modules = {path: envoy._module for path, envoy in envoys.items()}
        self._is_named = modules is not None
        self._requested = [
            (path, key) for path in (named_paths if self._is_named else envoys) for key in keys
        ]
        self._had_run = {(path, key) for path, key in self._requested if self._has_run(path, key)}

    def _has_run(self, path: str, key: str) -> bool:
        return self._interleaver.num_calls(f"{path}.{key}") > 0

    def warning(self) -> str | None:
        """Return a warning that names missing values and the reasons, or None; called after the run."""
        missing = list(self._missing())
        if not missing:
            return None
        more = f"; and {len(missing) - _MAX_NAMED} more" if len(missing) > _MAX_NAMED else ""
        return f"tracer.cache() has no value for {'; '.join(missing[:_MAX_NAMED])}{more}."

    def _missing(self) -> Iterator[str]:
        """Yield the missing values with reasons; of a cache of all modules, only what compilation hides."""
        opaque = {path for path, module in self._modules.items() if is_compiled(module)}
        opaque -= {path for path in opaque if self._was_called_inside(path)}
        if not self._is_named:
            requested = [path for path, _ in self._requested]
            for path in sorted(opaque):
                if any(path_in_cache.startswith(f"{path}.") for path_in_cache in requested):
                    yield f"what is inside {path}, {_COMPILED}"
            return
        for path, key in self._requested:
            entry = self._cache.entries.get(path)
            if entry is not None and key in entry.values:
                continue
            compiled_path = next(
                (path_in_cache for path_in_cache in opaque if path.startswith(f"{path_in_cache}.")), None
            )
            if compiled_path is not None:
                yield f"{path}.{key}, which is inside {compiled_path}, {_COMPILED}"
            elif (path, key) in self._had_run:
                yield f"{path}.{key}, which had run before the cache was created: create it first"
            elif self._has_run(path, key):
                yield f"{path}.{key}, which did not run after the cache was created"
            else:
                yield (
                    f"{path}.{key}, which did not run: the model does not use it, or computes it inside a "
                    "module around it, without a call of its own"
                )

    def _was_called_inside(self, path: str) -> bool:
        """Return whether modules inside the path were called: torch compiles some calls separately."""
        original = f"{path}._orig_mod"  # the compiled module itself, under its own name
        return any(entry.startswith(f"{path}.") and entry != original for entry in self._cache.entries)
