"""Tensors that are computed for a block, such as a sum of two: an edit replaces the model's value."""

from __future__ import annotations

import pytest
import torch

from nnsight_engine.vllm_backend.traces.errors import ChunkedPromptError
from nnsight_engine.vllm_backend.traces.rows import FlatBatcher, RowSpan

NUM_ROWS, WIDTH = 5, 3
POINT = "layers.0.output"


@pytest.fixture
def batcher() -> FlatBatcher:
    """Return the batcher of a request with rows 1 and 2, where a layer returns its stream as two tensors."""
    place = RowSpan()
    batcher = FlatBatcher(place)
    hidden = torch.arange(float(NUM_ROWS * WIDTH)).view(NUM_ROWS, WIDTH)
    place.enter(POINT, (hidden, torch.ones(NUM_ROWS, WIDTH)))
    batcher.set_num_rows(NUM_ROWS)
    batcher.group = (1, 2)
    return batcher


def lent(batcher: FlatBatcher) -> torch.Tensor:
    hidden, residual = batcher.narrow(batcher.group)
    stream: torch.Tensor = hidden + residual
    batcher.lend_computed(POINT, stream, (stream, torch.zeros_like(residual)))
    return stream


def test_a_sum_that_is_only_read_leaves_the_models_tensors(batcher: FlatBatcher) -> None:
    before = batcher.current_value
    lent(batcher)
    batcher.reclaim()
    assert all(one is other for one, other in zip(batcher.current_value, before, strict=True))
    assert not batcher.changed


def test_each_edit_of_a_sum_replaces_the_requests_rows(batcher: FlatBatcher) -> None:
    hidden, residual = batcher.current_value
    first, stream = lent(batcher), lent(batcher)
    for number in (1, 2):  # a block may go on after it has handed over, for example at a barrier
        stream += 100
        batcher.reclaim()
        total = batcher.current_value[0] + batcher.current_value[1]
        assert torch.equal(total[1:3], (hidden + residual)[1:3] + 100 * number)
        assert torch.equal(batcher.current_value[0][3:], hidden[3:])
    first[:] = -1
    batcher.reclaim()
    assert torch.equal(batcher.current_value[0][1:3], torch.full((2, WIDTH), -1.0))
    assert batcher.changed


def test_a_sum_over_earlier_chunks_of_a_prompt_cannot_be_edited(batcher: FlatBatcher) -> None:
    stream = torch.zeros(6, WIDTH)
    batcher.lend_computed(POINT, stream, (stream, stream))
    batcher.reclaim()
    stream[0] = 1
    with pytest.raises(ChunkedPromptError, match="3 chunks"):
        batcher.reclaim()
