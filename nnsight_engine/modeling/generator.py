"""Where generated tokens pass through the tree: ``model.generator``, and ``model.generator.streamer``."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from nnsight_engine.modeling.wrapper import WrapperModule


class Streamer(Protocol):
    """What transformers hands tokens to while it generates."""

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt, and then each step's tokens, ``[num_rows]``."""

    def end(self) -> None:
        """Take note that generation has ended."""


class Generator(WrapperModule):
    """Its output is what generation returns; its ``streamer``'s, each step's tokens."""

    def __init__(self) -> None:
        """Make the streamer's module."""
        super().__init__()
        self.streamer = WrapperModule()


class TokenFeed:
    """Hands each step's tokens to a module, so that blocks can read them, and to another streamer."""

    def __init__(self, module: torch.nn.Module, other: Streamer | None = None) -> None:
        """Feed ``module``, and ``other`` beside it."""
        self._module = module
        self._other = other
        self._begun = False

    def put(self, value: torch.Tensor) -> None:
        """Hand tokens on. The prompt comes first, which is nothing that was generated."""
        if self._begun:
            self._module(value)
        self._begun = True
        if self._other is not None:
            self._other.put(value)

    def end(self) -> None:
        """Hand on that generation has ended."""
        if self._other is not None:
            self._other.end()


def takes_streamer(config: Any, kwargs: dict[str, Any]) -> bool:
    """Tell whether generation with these arguments can hand on tokens as they come; beam search cannot."""
    return _setting("num_beams", config, kwargs) == 1


def rows_per_input(config: Any, kwargs: dict[str, Any]) -> frozenset[int]:
    """Return how many rows generation with these arguments may make of one: beams, and sequences returned."""
    names = ("num_beams", "num_return_sequences")
    return frozenset({1, *(_setting(name, config, kwargs) for name in names)})


def _setting(name: str, config: Any, kwargs: dict[str, Any]) -> int:
    given = kwargs.get("generation_config") or config
    value = kwargs[name] if name in kwargs else getattr(given, name, None)
    return int(value or 1)
