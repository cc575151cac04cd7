"""Communication between the tensor-parallel ranks of one model: the leading rank sends orders to the others.

Blocks run on the first rank only (see ``tensor_parallel``). Wherever a block may read or change a value, the
others execute its orders until it lets them continue. So random draws, control flow and lifetimes of blocks
cannot diverge, and no rank waits for one that is elsewhere. Orders are sent as vLLM's ranks send objects to
each other, tensors on a device by collectives of the group: all ranks call these with the same arguments,
each for its part of the model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec
import torch

from nnsight_engine.core.tensors import flat_bytes
from nnsight_engine.core.trees import tensors
from nnsight_engine.serialization import decode
from nnsight_engine.serialization.wire import encode_pieces
from nnsight_engine.vllm_backend.traces.errors import SpreadModuleError
from nnsight_engine.vllm_backend.traces.messages import (
    ALL_DTYPES,
    CallOrder,
    Continue,
    Tensors,
    ValueSlot,
    packed,
    unpacked,
)
from nnsight_engine.vllm_backend.traces.row_payloads import RowStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.distributed.parallel_state import GroupCoordinator

    from nnsight_engine.serialization.message import Piece


class GatherOrder(msgspec.Struct, frozen=True, tag=True):
    pass


class FetchOrder(msgspec.Struct, frozen=True, tag=True):
    path: str
    name: str


class ContinueOrder(Continue, frozen=True, tag=True):
    """The order to let the model continue; rows of ``undone`` requests are discarded in this step.

    ``is_true``: some block takes part in the step, or a trace's results are ready, whichever was the
    question.
    """

    is_true: bool = False
    undone: list[str] = msgspec.field(default_factory=list)


Order = GatherOrder | CallOrder | FetchOrder | ContinueOrder
_decoder: Final[msgspec.msgpack.Decoder[Order]] = msgspec.msgpack.Decoder(Order)


class Ranks:
    def __init__(self, group: GroupCoordinator) -> None:
        self.rank: int = group.rank_in_group
        self.size: int = group.world_size
        self._group = group

    def broadcast(
        self, order: Order, tensors: Sequence[torch.Tensor] = (), body: Sequence[Piece] = ()
    ) -> None:
        """Send an order to the other ranks, with the tensors of its slots, and bytes behind these."""
        on_host = [flat_bytes(tensor).numpy().data for tensor in tensors if tensor.device.type == "cpu"]
        self._group.broadcast_object(b"".join(packed(order, [*on_host, *body])))
        for tensor in tensors:
            if tensor.device.type != "cpu":
                self._group.broadcast(flat_bytes(tensor))

    def next_order(self) -> tuple[Order, RankTensors]:
        """Wait for the next order; its tensors must be read before anything else is exchanged."""
        order, body = unpacked(self._group.broadcast_object(), _decoder)
        return order, RankTensors(body, self._group)

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Return each rank's tensor, ``[ranks, *shape]``; all ranks call this together."""
        whole: torch.Tensor = self._group.all_gather(part.detach().contiguous()[None], dim=0)
        return whole

    # Arguments of calls.

    def broadcast_call(
        self, path: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], adapter: int | None
    ) -> None:
        """Send a ``CallOrder`` to the other ranks; SpreadModuleError if an argument cannot be sent."""
        refused = RowStore.refusal((args, kwargs))
        if refused is not None:
            raise SpreadModuleError.argument(f"a {refused}")
        sent = list(tensors((args, kwargs)))
        for tensor in sent:
            if tensor.layout is not torch.strided or tensor.device.type not in {
                "cpu",
                self._group.device.type,
            }:
                raise SpreadModuleError.argument(f"a tensor on {tensor.device} ({tensor.layout})")
        numbers = {id(tensor): str(number) for number, tensor in enumerate(sent)}

        def reference(value: Any) -> tuple[str, ...] | None:
            return (numbers[id(value)],) if isinstance(value, torch.Tensor) else None

        body = encode_pieces((args, kwargs), reference=reference)
        self.broadcast(CallOrder(path, method, list(map(slot_of_rank, sent)), adapter), sent, body)


class RankTensors(Tensors):
    """The tensors of an order: those on the host follow its header, others by a collective."""

    def __init__(self, body: memoryview, group: GroupCoordinator) -> None:
        super().__init__(body, ALL_DTYPES)
        self._group = group

    def next(self, slot: ValueSlot) -> torch.Tensor:
        """Return the next tensor; for one on the device all followers call this together."""
        if not slot.is_apart:
            return super().next(slot)
        tensor = torch.empty(slot.shape, dtype=ALL_DTYPES[slot.dtype], device=self._group.device)
        self._group.broadcast(flat_bytes(tensor))
        return tensor

    def arguments(self, order: CallOrder) -> tuple[tuple[Any, ...], dict[str, Any]]:
        leaves = list(map(self.next, order.slots))
        args, kwargs = decode(self.rest(), resolve=lambda name: leaves[int(name[0])])
        return args, kwargs


def slot_of_rank(tensor: torch.Tensor, number: int = 0) -> ValueSlot:
    name = str(tensor.dtype).removeprefix("torch.")
    return ValueSlot(name, list(tensor.shape), number, is_apart=tensor.device.type != "cpu")
