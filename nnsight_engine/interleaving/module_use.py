"""What a block does with modules beside the model's run, for whoever has to know of it.

A module that is called on values of the block's own, or a tensor that it has, is nothing special where the
model is in one piece. Where it is not, a subclass sees to it that all pieces take part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class ModuleUse:
    """The hooks that envoys call; the model is in one piece here."""

    def applied(
        self,
        path: str,  # noqa: ARG002 - a hook
        apply: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        method: str = "",  # noqa: ARG002 - a hook
    ) -> Any:
        """Apply the module at ``path``, or a method of it, to values of the running block's own."""
        return apply(*args, **kwargs)

    def called_directly(self, path: str) -> None:
        """Take note of a call of the module at ``path`` that is not ``applied``; a hook, to refuse it."""

    def held(self, path: str, name: str, value: torch.Tensor) -> torch.Tensor:  # noqa: ARG002 - a hook
        """Return a tensor that the module at ``path`` has under this name."""
        return value
