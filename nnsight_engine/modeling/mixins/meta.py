"""Lazy loading: first the structure, without memory for weights; the weights at the first real run.

Copies made by ``edit()`` share the tree, so one dispatch applies to all of them. ``GeneratingMixin`` is for
models with a method ``generate`` that takes the inputs of a trace, also where it is called outside one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Final, Self

import torch

from nnsight_engine.interleaving.batching import Batcher
from nnsight_engine.modeling.mixins.loadable import LoadableMixin


class MetaMixin(LoadableMixin):
    """Loads the structure at once, and the weights at the first run or by ``dispatch()``."""

    def __init__(self, source: Any, *args: Any, dispatch: bool = False, **kwargs: Any) -> None:
        """Wrap a module, or load one.

        Args:
            source: A module, or an argument of the class's loader.
            *args: Passed to the loader.
            dispatch: Whether to load the weights now.
            **kwargs: See ``LoadableMixin``.
        """
        attributes = self.__dict__
        attributes["_dispatched"] = dispatch or isinstance(source, torch.nn.Module)
        attributes["_copies"] = weakref.WeakSet()
        super().__init__(source, *args, **kwargs)

    def _module_from(self, source: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.nn.Module:
        """Return the module, or only its structure if its weights are to be loaded later."""
        if self.__dict__["_dispatched"]:
            return super()._module_from(source, args, kwargs)
        self.__dict__["_to_load"] = (source, args, kwargs)
        with torch.device("meta"):
            return self._load_meta(source, *args, **kwargs)

    def _load_meta(self, *args: Any, **kwargs: Any) -> torch.nn.Module:
        """Return the module without weights; called with the meta device as the default device."""
        raise NotImplementedError(
            f"{type(self).__name__} cannot load a module without its weights: pass dispatch=True, or "
            "implement _load_meta() on the class"
        )

    @property
    def dispatched(self) -> bool:
        """Whether the weights are loaded."""
        return bool(self._root.__dict__["_dispatched"])

    def dispatch(self) -> None:
        """Load the weights, unless they are loaded already."""
        root = self._root
        with self._interleaver.exclusive:
            if self.dispatched:
                return
            source, args, kwargs = root.__dict__.pop("_to_load")
            try:
                module = root._load(source, *args, **kwargs)  # noqa: SLF001 - the root of this tree
            except BaseException:
                root.__dict__["_to_load"] = (source, args, kwargs)  # allows another attempt
                raise
            root._update(module)  # noqa: SLF001
            for copied in root.__dict__["_copies"]:
                copied.__dict__["_module"] = module
            root.__dict__["_dispatched"] = True

    def _shallow_copy(self) -> Self:
        copied = super()._shallow_copy()
        self._root.__dict__["_copies"].add(copied)
        return copied

    def _prepare_run(self, batcher: Batcher) -> None:
        self.dispatch()
        super()._prepare_run(batcher)

    def __call__(self, *args: Any, hook: bool = False, **kwargs: Any) -> Any:
        """Call the module, see ``Envoy``; outside of traces, its weights are loaded first."""
        if self._interleaver.current is None:
            self.dispatch()
        return super().__call__(*args, hook=hook, **kwargs)


_GENERATE: Final = "generate"


class GeneratingMixin(MetaMixin):
    def _call_method(
        self, name: str, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call a method outside of a trace; ``generate`` takes the inputs that a trace takes."""
        if name != _GENERATE:
            return super()._call_method(name, method, args, kwargs)
        self.dispatch()
        if self._has_input(args, kwargs):
            args, kwargs, _ = self._prepare_input(*args, **kwargs)
        return self._generate(*args, **kwargs)

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError
