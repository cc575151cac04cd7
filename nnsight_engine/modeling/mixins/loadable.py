"""Models that load themselves: the first argument is a module, or specifies one to load."""

from __future__ import annotations

from typing import Any, Final

import torch

from nnsight_engine.modeling.base import NNsight

_ENVOY_OPTIONS: Final = ("rename", "envoys")
"""Keyword arguments for the envoys; all others are for the loader."""


class LoadableMixin(NNsight):
    """Wraps a module, or loads the one that its first argument specifies."""

    def __init__(self, source: Any, *args: Any, **kwargs: Any) -> None:
        """Wrap or load a module.

        Args:
            source: A module, or an argument of the class's loader: a repository, a folder, a config.
            *args: Passed to the loader.
            **kwargs: ``rename`` and ``envoys`` apply to the envoys; others are passed to the loader.

        Raises:
            TypeError: A module is passed together with arguments for the loader.
        """
        options = {name: kwargs.pop(name) for name in _ENVOY_OPTIONS if name in kwargs}
        super().__init__(self._module_from(source, args, kwargs), **options)

    def _module_from(self, source: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.nn.Module:
        """Return ``source`` if it is a module, else the one that the class's loader makes of it."""
        if not isinstance(source, torch.nn.Module):
            return self._load(source, *args, **kwargs)
        if args or kwargs:
            arguments = [*map(repr, args), *kwargs]
            raise TypeError(
                f"{type(self).__name__} was given a module, which needs no loading, and arguments for "
                f"loading one: {', '.join(arguments)}. Load the module with them, or leave them out."
            )
        return source

    def _load(self, *args: Any, **kwargs: Any) -> torch.nn.Module:
        raise NotImplementedError(
            f"{type(self).__name__} cannot load a module: pass one, or implement _load() on the class"
        )
