"""Models with a method ``generate`` that takes the inputs of a trace, also where it is called outside one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from nnsight_engine.modeling.mixins.meta import MetaMixin

_GENERATE: Final = "generate"


class GeneratingMixin(MetaMixin):
    def _call_method(
        self, name: str, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if name != _GENERATE:
            return super()._call_method(name, method, args, kwargs)
        self.dispatch()
        if self._has_input(args, kwargs):
            args, kwargs, _ = self._prepare_input(*args, **kwargs)
        return self._generate(*args, **kwargs)

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError
