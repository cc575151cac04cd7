"""States of recurrent layers move between blocks as vLLM's V1 runner says with slices of tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.v1.worker import mamba_utils
from vllm.v1.worker.mamba_utils import MambaSpecDecodeGPUContext

from nnsight_engine.vllm_backend.cpu_kernels.model_states import find_sources

BLOCK = 8
WIDTH, CHANNELS = 5, 3
NUM_BLOCKS, NUM_COLUMNS, NUM_REQUESTS = 40, 6, 4


class Layer:
    """The window of a convolution and another state, both in one page with a gap, and their blocks."""

    def __init__(self, *, dim_first: bool) -> None:
        page = torch.randn(NUM_BLOCKS, 64)
        shape = (CHANNELS, WIDTH) if dim_first else (WIDTH, CHANNELS)
        self.window = page[:, : WIDTH * CHANNELS].unflatten(1, shape)
        self.other = page[:, 20:44]
        self.tokens_of_window = 2 if dim_first else 1
        table = torch.randperm(NUM_BLOCKS)[: NUM_REQUESTS * NUM_COLUMNS]
        self.table = table.view(NUM_REQUESTS, NUM_COLUMNS).int()

    def context(self) -> MambaSpecDecodeGPUContext:
        """Return vLLM's description of it, by which its kernels are launched."""
        states = (self.window, self.other)
        is_dim_first = self.tokens_of_window == 2
        return MambaSpecDecodeGPUContext(
            state_base_addrs=torch.tensor([state.data_ptr() for state in states]),
            state_block_strides=torch.tensor([state.stride(0) * 4 for state in states]),
            state_elem_sizes=torch.tensor([4, 4], dtype=torch.int32),
            state_inner_sizes=torch.tensor([1 if is_dim_first else CHANNELS, 24]),
            state_conv_widths=torch.tensor([WIDTH, 0], dtype=torch.int32),
            state_group_indices=torch.zeros(2, dtype=torch.int32),
            state_dim_row_count=torch.tensor([CHANNELS if is_dim_first else 0, 0], dtype=torch.int32),
            state_dim_row_stride=torch.tensor([self.window.stride(1) * 4 if is_dim_first else 0, 0]),
            block_size=BLOCK,
            num_states=2,
            mamba_group_ids=[0],
            num_groups=1,
            num_accepted_tokens_out=torch.zeros(NUM_REQUESTS, dtype=torch.int32),
            block_table_ptrs=torch.tensor([self.table.data_ptr()]),
            aligned_index_block_table_ptrs=torch.tensor([self.table.data_ptr()]),
            block_table_stride_req=self.table.stride(0),
            is_initialized=True,
        )

    def copied(self, moves: list[tuple[int, int, int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both states after moves of request, column, column and number of tokens that are left."""
        window, other = self.window.clone(), self.other.clone()
        for request, source, target, skipped in moves:
            blocks = self.table[request]
            axis = self.tokens_of_window - 1
            kept = window[blocks[source]].narrow(axis, skipped, WIDTH - skipped).clone()
            window[blocks[target]].narrow(axis, 0, WIDTH - skipped).copy_(kept)
            other[blocks[target]] = self.other[blocks[source + skipped]]
        return window, other


@pytest.fixture(params=[False, True], ids=["tokens first", "channels first"])
def layer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Layer:
    monkeypatch.setattr(mamba_utils, "is_conv_state_dim_first", lambda: request.param)
    return Layer(dim_first=request.param)


def ints(*values: int) -> Any:
    return torch.tensor(values, dtype=torch.int32)


def test_states_move_to_the_block_that_a_step_ends_in(layer: Layer) -> None:
    # One moves on by a block, one with two tokens accepted, one stays, one is new.
    state, accepted = ints(0, 1, 2, -1), ints(1, 2, 3, 1)
    computed, starts = ints(BLOCK, 2 * BLOCK, 2 * BLOCK + 2, 0), ints(0, 1, 4, 5, 5 + BLOCK)
    sources, biases = ints(9, 9, 9, 9), ints(9, 9, 9, 9)
    mapping = ints(0, 1, 2, 3)
    find_sources(
        idx_mapping=mapping, state_idx=state, num_computed_tokens=computed, query_start_loc=starts,
        num_accepted_tokens=accepted, src_col=sources, src_off=biases, num_reqs=4, mamba_block_size=BLOCK,
    )  # fmt: skip
    assert sources.tolist() == [0, 1, 2, -1]
    assert biases.tolist() == [0, 1, 2, 0]
    assert state.tolist() == [1, 2, 2, 0]
    assert accepted.tolist() == [1, 1, 3, 1]
    window, other = layer.copied([(0, 0, 1, 0), (1, 1, 2, 1)])
    layer.context().run_fused_precopy(4, state, sources, biases, mapping)
    assert torch.equal(layer.window, window)
    assert torch.equal(layer.other, other)


def test_states_move_to_the_last_block_that_drafts_have_filled(layer: Layer) -> None:
    # One fills a block with its second of three tokens, one ends below, one is not in the batch, one fills
    # the block that its state is in.
    computed, accepted = ints(2 * BLOCK + 1, BLOCK + 5, 3 * BLOCK, BLOCK), ints(3, 2, 3, 2)
    state, mapping = ints(2, 1, 2, 0), ints(3, -1, 1, 0)
    window, other = layer.copied([(0, 2, 1, 1), (3, 0, 0, 1)])
    layer.context().run_fused_postprocess_align(4, accepted, state, computed, mapping)
    assert torch.equal(layer.window, window)
    assert torch.equal(layer.other, other)
    assert accepted.tolist() == [3, 2, 3, 1]
