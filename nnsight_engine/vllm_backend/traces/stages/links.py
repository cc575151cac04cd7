"""Messages between two stages of one pipeline, one after the other, on the host.

vLLM's own messages between stages use the same process group; a tag keeps the two apart. Whoever sends waits
until the other side receives, so both must know from the engine's step alone what comes next; ``last_stage``
says how.
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
    """What messages go through, in order; a ``StageLink``, or a pair of queues in a test."""

    def send(self, *message: Any, reference: Reference | None = None) -> None:
        """Send values, tensors among them; ``reference`` names what stays here."""

    def receive(self, *, resolve: Resolve | None = None) -> tuple[Any, ...]:
        """Wait for the next message; ``resolve`` gives what stayed on this side."""


class StageLink:
    """The way to one other stage.

    Args:
        stage: The other one's number.
    """

    def __init__(self, stage: int) -> None:
        """Use the pipeline's process group."""
        group = get_pp_group()
        self._group = group.cpu_group
        self._peer = group.ranks[stage]

    def send(self, *message: Any, reference: Reference | None = None) -> None:
        """Send values, tensors among them, see ``Channel``.

        Raises:
            EncodeError: Something in them cannot travel; nothing was sent.
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
