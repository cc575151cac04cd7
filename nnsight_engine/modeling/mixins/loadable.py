"""Models that load themselves: the first argument is a module, or says where to find one.

A subclass says how with ``_load``. What is to be said to the envoys (``rename``, ``envoys``) is kept apart
from what is to be said to the loader, so that the latter can go on to it unseen.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from nnsight_engine.modeling.base import NNsight

ENVOY_OPTIONS: Final = ("rename", "envoys")
"""Keyword arguments that are for the envoys; all others are for the loader."""


class LoadableMixin(NNsight):
    """Wraps a module, or loads the one that its first argument names."""

    def __init__(self, source: Any, *args: Any, **kwargs: Any) -> None:
        """Wrap or load.

        Args:
            source: A module, or whatever the class's loader takes: a repository, a folder, a config.
            *args: For the loader.
            **kwargs: ``rename`` and ``envoys`` are the envoys'; all else is the loader's.

        Raises:
            TypeError: There are arguments for a loader, and a module that needs none.
        """
        options = take_envoy_options(kwargs)
        super().__init__(self._module_from(source, args, kwargs), **options)

    def _module_from(self, source: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.nn.Module:
        """Return the module to start with."""
        if not isinstance(source, torch.nn.Module):
            return self._load(source, *args, **kwargs)
        if args or kwargs:
            given = [*map(repr, args), *kwargs]
            raise TypeError(
                f"{type(self).__name__} was given a module, which needs no loading, and arguments for "
                f"loading one: {', '.join(given)}. Load the module with them, or leave them out."
            )
        return source

    def _load(self, *args: Any, **kwargs: Any) -> torch.nn.Module:
        """Return the module with its weights."""
        raise NotImplementedError(
            f"{type(self).__name__} cannot load a module: pass one, or implement _load() on the class"
        )


def take_envoy_options(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Remove what is for the envoys from ``kwargs``, and return it."""
    return {name: kwargs.pop(name) for name in ENVOY_OPTIONS if name in kwargs}
