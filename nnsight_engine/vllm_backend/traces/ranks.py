"""Communication between the tensor-parallel ranks of one model: the leading rank sends orders to the others.

Blocks run on the first rank only (see ``tp_leader``). The other ranks compute their parts of the model.
Wherever a block may read or change a value, they execute the leading rank's orders until it lets them
continue. So random draws, control flow and lifetimes of blocks cannot diverge between ranks, and no rank
waits for one that is elsewhere.

Orders are sent as vLLM's ranks send objects to each other; tensors by the collectives of the group.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Final

import torch
from vllm.distributed import get_tp_group

from nnsight_engine.core.tensor_bytes import flat_bytes
from nnsight_engine.vllm_backend.traces.errors import SpreadModuleError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.distributed.parallel_state import GroupCoordinator

_PLAIN: Final = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


@dataclasses.dataclass(frozen=True, slots=True)
class TensorSlot:
    """A placeholder for a tensor in an order.

    Attributes:
        shape: The tensor's shape.
        dtype: The tensor's dtype.
        content: The tensor's bytes; None if it follows by a collective on its device.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    content: bytes | None

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorSlot:
        """Return the placeholder of a tensor."""
        content = _as_bytes(tensor).numpy().tobytes() if tensor.device.type == "cpu" else None
        return TensorSlot(tuple(tensor.shape), tensor.dtype, content)


@dataclasses.dataclass(frozen=True, slots=True)
class GatherMessage:
    """The order to gather the value at hand."""


@dataclasses.dataclass(frozen=True, slots=True)
class CallMessage:
    """The order to call a module for a block.

    Attributes:
        path: The module.
        method: The name of its method; empty for the module itself.
        arguments: ``(args, kwargs)`` with slots for tensors.
    """

    path: str
    method: str
    arguments: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Fetch:
    """The order to gather a tensor of a module.

    Attributes:
        path: The module.
        name: The attribute's name.
    """

    path: str
    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class ContinueOrder:
    """The order to let the model continue.

    Attributes:
        wanted: The providers at which to stop and wait for orders.
        changed: Slots of the tensors of the value at hand that blocks have replaced, by number.
        is_true: The answer to the question that the ranks decide together: whether some block takes part in
            the step, or whether a trace's results are ready.
        undone: Requests whose rows of the running step are discarded.
    """

    wanted: frozenset[str]
    changed: tuple[tuple[int, TensorSlot], ...] = ()
    is_true: bool = False
    undone: tuple[str, ...] = ()


Order = GatherMessage | CallMessage | Fetch | ContinueOrder


class Ranks:
    """The ranks of a tensor-parallel group, seen from one of them.

    Attributes:
        rank: This rank's number.
        size: The number of ranks.
    """

    def __init__(self, group: GroupCoordinator) -> None:
        self.rank: int = group.rank_in_group
        self.size: int = group.world_size
        self._group = group

    @staticmethod
    def of_this_worker() -> Ranks:
        """Return the ranks that share this worker's model."""
        return Ranks(get_tp_group())

    @property
    def is_leader(self) -> bool:
        """Whether this rank runs the blocks."""
        return self.rank == 0

    def broadcast(self, order: Order, tensors: Sequence[torch.Tensor] = ()) -> None:
        """Send an order to the other ranks, followed by the tensors that it refers to."""
        self._group.broadcast_object(order)
        for tensor in tensors:
            if tensor.device.type != "cpu":
                self._group.broadcast(_as_bytes(tensor))

    def next_order(self) -> Order:
        """Wait for the next order."""
        order: Order = self._group.broadcast_object()
        return order

    def receive(self, slot: TensorSlot) -> torch.Tensor:
        """Return a tensor that an order refers to; for a device tensor all followers call this together."""
        if slot.content is None:
            tensor = torch.empty(slot.shape, dtype=slot.dtype, device=self._group.device)
            self._group.broadcast(_as_bytes(tensor))
            return tensor
        tensor = torch.empty(slot.shape, dtype=slot.dtype)
        if slot.content:
            _as_bytes(tensor).copy_(torch.frombuffer(bytearray(slot.content), dtype=torch.uint8))
        return tensor

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Return each rank's tensor, ``[ranks, *shape]``; all ranks call this together."""
        whole: torch.Tensor = self._group.all_gather(part.detach().contiguous()[None], dim=0)
        return whole

    # Encoding of values.

    def packed(self, value: Any, tensors: list[torch.Tensor]) -> Any:
        """Return ``value`` with slots in place of its tensors, which are appended to ``tensors``.

        Raises:
            SpreadModuleError: It holds something that cannot be sent.
        """
        if isinstance(value, torch.Tensor):
            if value.layout is not torch.strided or value.device.type not in {"cpu", self._group.device.type}:
                raise SpreadModuleError.argument(f"a tensor on {value.device} ({value.layout})")
            tensors.append(value)
            return TensorSlot.of(value)
        if type(value) in {tuple, list}:
            return type(value)(self.packed(one, tensors) for one in value)
        if type(value) is dict:
            return {self.packed(key, []): self.packed(one, tensors) for key, one in value.items()}
        if type(value) not in _PLAIN and not isinstance(value, torch.dtype | torch.device):
            raise SpreadModuleError.argument(f"a {type(value).__name__}")
        return value

    def unpacked(self, value: Any) -> Any:
        """Return the value that was given to ``packed``, receiving its tensors."""
        if isinstance(value, TensorSlot):
            return self.receive(value)
        if isinstance(value, tuple | list):
            return type(value)(self.unpacked(one) for one in value)
        if isinstance(value, dict):
            return {key: self.unpacked(one) for key, one in value.items()}
        return value


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's memory, or a copy, as bytes, since collectives may not support its dtype."""
    return flat_bytes(tensor)
