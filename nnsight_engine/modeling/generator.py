"""Modules through which generated tokens pass: ``model.generator`` and ``model.generator.streamer``.

They are identity modules, which give a place in the tree to a value that no other module computes.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch


class WrapperModule(torch.nn.Module):
    """The identity; several positional arguments are returned as a tuple."""

    def forward(self, *args: Any) -> Any:
        return args[0] if len(args) == 1 else args


class Streamer(Protocol):
    def put(self, value: torch.Tensor) -> None:
        """Receive the prompt, and then the tokens of each step, ``[num_rows]``."""

    def end(self) -> None: ...


class Generator(WrapperModule):
    """A module whose output is the result of the generation; its ``streamer`` outputs each step's tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.streamer = WrapperModule()


class TokenFeed:
    """Passes each step's tokens to ``module``, where blocks can read them, and everything to ``other``."""

    def __init__(self, module: torch.nn.Module, other: Streamer | None = None) -> None:
        self._module = module
        self._streamer = other
        self._begun = False

    def put(self, value: torch.Tensor) -> None:
        """Pass tokens on. The first call contains the prompt, which is not passed to the module."""
        if self._begun:
            self._module(value)
        self._begun = True
        if self._streamer is not None:
            self._streamer.put(value)

    def end(self) -> None:
        if self._streamer is not None:
            self._streamer.end()


def takes_streamer(config: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether generation with these arguments supports a streamer; beam search does not."""
    return _setting("num_beams", config, kwargs) == 1


def rows_per_input(config: Any, kwargs: dict[str, Any]) -> frozenset[int]:
    """Return how many rows generation may create from one: 1, the beams, or the returned sequences."""
    names = ("num_beams", "num_return_sequences")
    return frozenset({1, *(_setting(name, config, kwargs) for name in names)})


def _setting(name: str, config: Any, kwargs: dict[str, Any]) -> int:
    settings = kwargs.get("generation_config") or config
    value = kwargs[name] if name in kwargs else getattr(settings, name, None)
    return int(value or 1)
