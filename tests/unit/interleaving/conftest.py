"""A run without a model: blocks as plain functions, and a list of values in place of a forward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from nnsight_engine.interleaving.batching import Batcher, BatchGroup
from nnsight_engine.interleaving.interleaver import Interleaver
from nnsight_engine.interleaving.mediator import Mediator

Block = Callable[[Mediator], None]


class Scene:
    """Blocks and the interleaver that they run beside, once."""

    def __init__(self) -> None:
        self.interleaver = Interleaver()
        self.batcher = Batcher()
        self.mediators: list[Mediator] = []
        self.log: list[Any] = []

    def block(self, function: Block, rows: BatchGroup | None = None) -> Block:
        """Add a block, which is called with its mediator."""
        mediator = Mediator(lambda: function(mediator), batch_group=rows)
        self.mediators.append(mediator)
        if rows is not None:
            self.batcher.groups.append(rows)
            self.batcher.total_batch_size += rows[1]
        return function

    def rows(self, first: int, num_rows: int) -> Callable[[Block], Block]:
        """Add a block that owns rows of the batch."""
        return lambda function: self.block(function, (first, num_rows))

    def run(self, function: Callable[[], Any]) -> Any:
        """Run ``function`` as the model, with the blocks beside it."""
        self.interleaver.initialize(self.mediators, batcher=self.batcher)
        return self.interleaver.run(function)

    def provide(self, *values: tuple[str, Any]) -> list[Any]:
        """Run a model that provides these values, one after the other; returns what became of them."""
        return self.run(  # type: ignore[no-any-return]
            lambda: [self.interleaver.handle(name, value, iterate=True) for name, value in values]
        )


@pytest.fixture
def scene() -> Scene:
    return Scene()
