"""Two tensor-parallel ranks in two threads."""

from __future__ import annotations

import dataclasses
import queue
import threading
from typing import Any, Final, cast

import torch

from nnsight_engine.vllm_backend.traces.ranks import Ranks

_WAIT_S: Final = 120


@dataclasses.dataclass
class QueuedGroup:
    """vLLM's group of two ranks, which are two threads."""

    rank_in_group: int
    orders: queue.Queue[Any]
    meet: threading.Barrier
    parts: list[Any]
    device: torch.device
    world_size: int = 2

    def broadcast_object(self, order: bytes | None = None) -> Any:
        if order is None:
            return self.orders.get(timeout=_WAIT_S)
        self.orders.put(order)
        return order

    def broadcast(self, tensor: torch.Tensor) -> None:
        if self.rank_in_group:
            tensor.copy_(self.orders.get(timeout=_WAIT_S))
        else:
            self.orders.put(tensor.clone())

    def all_gather(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        self.parts[self.rank_in_group] = part
        self.meet.wait(_WAIT_S)
        whole = torch.cat(self.parts, dim)
        self.meet.wait(_WAIT_S)
        return whole


def two_ranks(device: str = "cpu") -> tuple[Ranks, Ranks, queue.Queue[Any]]:
    """Return two ranks, and the orders that are on their way."""
    orders: queue.Queue[Any] = queue.Queue()
    meet, parts = threading.Barrier(2), [None, None]
    groups = [QueuedGroup(rank, orders, meet, parts, torch.device(device)) for rank in range(2)]
    first, second = (Ranks(cast("Any", group)) for group in groups)
    return first, second, orders
