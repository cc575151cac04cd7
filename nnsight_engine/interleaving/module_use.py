"""Hooks on a block's direct use of modules, beside the model's run, for backends that distribute it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class ModuleUse:
    """The hooks that envoys call; this class is for a model in one process."""

    def applied(
        self,
        path: str,  # noqa: ARG002 - a hook
        apply: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        method: str = "",  # noqa: ARG002 - a hook
    ) -> Any:
        return apply(*args, **kwargs)

    def called_directly(self, path: str) -> None:
        """Record a direct call of the module at ``path``, beside ``applied``; a subclass may reject it."""

    def whole_tensor(self, path: str, name: str, value: torch.Tensor) -> torch.Tensor:  # noqa: ARG002 - a hook
        """Return a tensor of the module at ``path``, whole; a subclass may gather its parts."""
        return value
