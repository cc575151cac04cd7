"""Ordered messages between two stages of one pipeline, over host memory.

vLLM's own messages between stages use the same process group; a tag separates the two. A send blocks until
the other side receives, so both sides must derive the next message from the engine's step alone;
``last_stage`` describes the protocol.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

import torch
import torch.distributed
from vllm.distributed import get_pp_group

from nnsight_engine.serialization import decode, encode

_TAG: Final = 0x6E6E

Reference = Callable[[Any], tuple[str, ...] | None]
Resolve = Callable[[tuple[str, ...]], Any]


class Channel(Protocol):
    """An ordered message channel: a ``StageLink``, or a pair of queues in a test."""

    def send(self, *message: Any, reference: Reference | None = None) -> None:
        """Send values, which may contain tensors; ``reference`` names the objects that stay here."""

    def receive(self, *, resolve: Resolve | None = None) -> tuple[Any, ...]:
        """Wait for the next message; ``resolve`` returns the objects that stayed on this side."""


class StageLink:
    """The link to one other stage.

    Args:
        stage: The other stage's number.
    """

    def __init__(self, stage: int) -> None:
        group = get_pp_group()
        self._group = group.cpu_group
        self._peer = group.ranks[stage]

    def send(self, *message: Any, reference: Reference | None = None) -> None:
        """Send values, which may contain tensors, see ``Channel``; blocks until they are received.

        Raises:
            EncodeError: A value cannot be encoded; nothing was sent.
        """
        data = torch.frombuffer(bytearray(encode(message, reference=reference)), dtype=torch.uint8)
        for part in (torch.tensor([data.numel()]), data):
            torch.distributed.send(part, dst=self._peer, group=self._group, tag=_TAG)

    def receive(self, *, resolve: Resolve | None = None) -> tuple[Any, ...]:
        """Wait for the next message."""
        size = torch.empty(1, dtype=torch.long)
        torch.distributed.recv(size, src=self._peer, group=self._group, tag=_TAG)
        data = torch.empty(int(size), dtype=torch.uint8)
        torch.distributed.recv(data, src=self._peer, group=self._group, tag=_TAG)
        message: tuple[Any, ...] = decode(data.numpy().data, resolve=resolve)
        return message


def own_stage() -> int:
    """Return the number of this worker's stage."""
    stage: int = get_pp_group().rank_in_group
    return stage


def num_stages() -> int:
    """Return how many stages the pipeline has."""
    size: int = get_pp_group().world_size
    return size
