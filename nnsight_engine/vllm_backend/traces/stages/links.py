"""Ordered messages between two stages of one pipeline, over host memory.

vLLM's own messages between stages use the same process group; a tag separates the two. A send blocks until
the other side receives, so both sides must derive the next message from the engine's step alone, see
``last_stage``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import torch
import torch.distributed
from vllm.distributed import get_pp_group

from nnsight_engine.serialization.message.table import Piece

_TAG: Final = 0x6E6E


class Channel(Protocol):
    """An ordered message channel: a ``StageLink``, or a pair of queues in a test."""

    def send(self, message: Sequence[Piece]) -> None:
        """Send a message, given as parts; may block until it is received."""

    def receive(self) -> memoryview:
        """Wait for the next message; return its bytes, to which no other code writes."""


class StageLink:
    def __init__(self, stage: int) -> None:
        group = get_pp_group()
        self._group = group.cpu_group
        self._peer = group.ranks[stage]

    def send(self, message: Sequence[Piece]) -> None:
        data = torch.frombuffer(bytearray().join(message), dtype=torch.uint8)
        for part in (torch.tensor([data.numel()]), data):
            torch.distributed.send(part, dst=self._peer, group=self._group, tag=_TAG)

    def receive(self) -> memoryview:
        size = torch.empty(1, dtype=torch.long)
        torch.distributed.recv(size, src=self._peer, group=self._group, tag=_TAG)
        data = torch.empty(int(size), dtype=torch.uint8)
        torch.distributed.recv(data, src=self._peer, group=self._group, tag=_TAG)
        return data.numpy().data


def own_stage() -> int:
    stage: int = get_pp_group().rank_in_group
    return stage


def num_stages() -> int:
    size: int = get_pp_group().world_size
    return size
