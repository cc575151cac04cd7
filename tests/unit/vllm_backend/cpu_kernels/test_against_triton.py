"""Every function for CPUs beside its kernel in Triton's interpreter, on random batches.

Triton decides at its import whether kernels are interpreted, and vLLM whether it has Triton. So the
comparison is a process of its own: this module's ``main``, which takes the number of batches, and names of
kernels if not all are to be compared.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import pytest
import torch

MAX_REQUESTS, MAX_LENGTH = 7, 64
WORKER: Final = "vllm.v1.worker."


@pytest.mark.parametrize("num_seeds", [2, pytest.param(20, marks=pytest.mark.heavy)])
def test_functions_equal_tritons_kernels(num_seeds: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.vllm_backend.cpu_kernels.test_against_triton", str(num_seeds)],
        env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]


class Batch:
    """A random batch: requests within their prompts, at the end of them and generating, some with drafts.

    Attributes have the names that kernels give them; ``launch`` takes them from here.

    Args:
        name: The kernel to launch.
    """

    max_num_reqs = MAX_REQUESTS
    max_model_len = 20
    block_size = copy_block_size = 4

    def __init__(self, name: str, seed: int) -> None:
        self.name = name
        self.draw = draw = random.Random(f"{name} {seed}")
        self.generator = torch.Generator().manual_seed(draw.getrandbits(32))
        self.vocab_size = draw.choice((33, 70, 1100))
        self.num_reqs = draw.randrange(5)
        self.num_speculative_steps = draw.randint(1, 4)
        requests = draw.sample(range(MAX_REQUESTS), self.num_reqs)
        self.prompt_len, self.prefill_len, self.num_computed_tokens, self.total_len = (
            torch.full((MAX_REQUESTS,), 5, dtype=torch.int32) for _ in range(4)
        )
        self.prefill_lens = self.prefill_len
        lengths, nums_logits = [], []
        for request in requests:
            prompt = draw.randint(1, 20)
            prefill = prompt + draw.choice((0, 0, 1, 5))
            kind = draw.choice(("prompt", "its end", "generates", "generates"))
            if kind == "prompt":
                computed = draw.randrange(prefill)
                lengths.append(draw.randint(1, prefill - computed))
                nums_logits.append(1)
            else:  # the end of a prompt may have drafts that nobody made
                computed = prefill - 1 if kind == "its end" else prefill + draw.randrange(6)
                steps = self.num_speculative_steps
                lengths.append(1 + draw.choice((0, steps, draw.randint(0, steps))))
                nums_logits.append(lengths[-1])
            self.prompt_len[request], self.prefill_len[request] = prompt, prefill
            self.num_computed_tokens[request] = computed
            self.total_len[request] = max(computed + 1, prefill)
        self.idx_mapping = ints(requests)
        self.query_start_loc = ints([0, *itertools.accumulate(lengths)])
        self.cu_num_logits = ints([0, *itertools.accumulate(nums_logits)])
        self.num_tokens, self.num_logits = sum(lengths), sum(nums_logits)
        self.seq_lens = self.num_computed_tokens[self.idx_mapping] + ints(lengths)
        rows = [(row, place) for row, num in enumerate(nums_logits) for place in range(num)]
        self.expanded_idx_mapping = ints([requests[row] for row, _ in rows])
        self.expanded_local_pos = ints([place for _, place in rows])
        ends = [*itertools.accumulate(lengths)]
        self.logits_indices = torch.tensor(
            [ends[row] - nums_logits[row] + place for row, place in rows], dtype=torch.int64
        )
        starts = self.num_computed_tokens[self.idx_mapping].tolist()
        self.positions = torch.tensor(
            [start + place for start, length in zip(starts, lengths, strict=True) for place in range(length)],
            dtype=torch.int64,
        )
        self.target_positions = self.positions
        self.temperatures = self.chosen(0.0, 0.7, 1.0, 1.6)
        self.seeds = self.ints(-(2**62), 2**62, MAX_REQUESTS, dtype=torch.int64)
        self.all_token_ids = self.tokens(MAX_REQUESTS, MAX_LENGTH)
        is_chunk = self.seq_lens < self.prefill_len[self.idx_mapping]
        self.num_sampled = ints([draw.randint(1, num) for num in nums_logits]).masked_fill(is_chunk, 0)
        self.sampled = self.tokens(self.num_reqs, self.num_speculative_steps + 1, dtype=torch.int64)
        self.num_rejected = ints([draw.randrange(num) for num in nums_logits])

    def ints(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """Return numbers from ``low`` to ``high``, excluded."""
        return torch.randint(low, high, shape, generator=self.generator, dtype=torch.int64).to(dtype)

    def tokens(self, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return self.ints(0, self.draw.choice((4, self.vocab_size)), *shape, dtype=dtype)

    def long_tokens(self, *shape: int) -> torch.Tensor:
        return self.tokens(*shape, dtype=torch.int64)

    def logits(self, *shape: int) -> torch.Tensor:
        """Return logits, of the batch's rows by default, that do not follow each other in memory."""
        wide = 3 * torch.randn(*(shape or (self.num_logits,)), self.vocab_size + 5, generator=self.generator)
        return wide[..., : self.vocab_size]

    def chosen(self, *values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return one of these values for each request that there could be."""
        return torch.tensor(self.draw.choices(values, k=MAX_REQUESTS), dtype=dtype)

    def counts(self, *values: int) -> torch.Tensor:
        return self.chosen(*values, dtype=torch.int32)

    def with_padding(self, values: torch.Tensor) -> torch.Tensor:
        """Return values of which some are -1."""
        return values.masked_fill(self.ints(0, 4, len(values)) == 0, -1)

    def launch(self, *grid: int, kernel: str = "", **given: Any) -> list[torch.Tensor]:
        """Launch a kernel, and return its tensors; strides are those of the tensors."""
        name = kernel or self.name
        module, _, attribute = name.partition(":")
        arguments = {}
        for parameter in PARAMETERS[name]:
            plain = parameter.removesuffix("_ptr")
            if plain in given:
                arguments[parameter] = given.pop(plain)
            elif "_stride" in parameter:
                owner, _, dim = parameter.partition("_stride")
                source = arguments.get(owner, arguments.get(f"{owner}_ptr"))
                arguments[parameter] = 0 if source is None else source.stride(int(dim.strip("_") or 0))
            else:
                arguments[parameter] = getattr(self, plain.lower())
        assert not given, f"{name} has no parameters {', '.join(given)}"
        getattr(of(module), attribute)[grid](**arguments)
        return [value for value in arguments.values() if isinstance(value, torch.Tensor)]


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def blocks_of(count: int, size: int) -> int:
    return -(-count // size)


def of(module: str) -> Any:
    return importlib.import_module(WORKER + module)


def addresses(tensors: list[torch.Tensor]) -> Any:
    """Return block tables as vLLM gives them to kernels: as addresses, for functions as a list."""
    return of("gpu.block_table").BlockTables._make_ptr_tensor(SimpleNamespace(device="cpu"), tensors)


PARAMETERS: Final[dict[str, tuple[str, ...]]] = {}
Case = Callable[[Batch], object]
CASES: Final[dict[str, Case]] = {}
"""What plays each kernel on a batch, and returns all tensors that it could have written."""


def plays(*names: str) -> Callable[[Case], Case]:
    def register(case: Case) -> Case:
        CASES.update(dict.fromkeys(names, case))
        return case

    return register


@plays("gpu.buffer_utils:_apply_write_kernel")
def _(batch: Batch) -> object:
    is_fused, num_writes = batch.draw.random() < 0.5, batch.draw.randrange(5)
    lengths = [batch.draw.randrange(6) for _ in range(num_writes)]
    tables = [batch.tokens(MAX_REQUESTS, width) for width in (12, 16)]
    batch.launch(
        num_writes,
        output=addresses(tables) if is_fused else tables[0],
        output_stride=torch.tensor([12, 16]) if is_fused else 12,
        write_indices=ints(batch.draw.sample(range(MAX_REQUESTS), num_writes)),
        write_starts=batch.ints(0, 6, num_writes),
        write_contents=batch.tokens(sum(lengths)),
        write_cu_lens=ints([*itertools.accumulate(lengths)]),
        write_group_ids=batch.ints(0, 2, num_writes) if is_fused else None,
        MULTI_GROUP=is_fused,
    )
    return tables


@plays("gpu.block_table:_gather_block_tables_kernel")
def _(batch: Batch) -> object:
    sources, targets = ([batch.tokens(MAX_REQUESTS, width) for width in (9, 12)] for _ in range(2))
    batch.launch(
        2,
        batch.num_reqs + batch.draw.randrange(3),
        batch_idx_to_req_idx=batch.idx_mapping,
        src_block_table_ptrs=addresses(sources),
        dst_block_table_ptrs=addresses(targets),
        block_table_strides=torch.tensor([9, 12]),
        num_blocks=batch.ints(0, 10, 2, MAX_REQUESTS),
    )
    return targets


@plays("gpu.block_table:_compute_slot_mappings_kernel")
def _(batch: Batch) -> object:
    tables = [batch.ints(0, 99, MAX_REQUESTS, width) for width in (16, 4)]
    slots = batch.long_tokens(2, batch.num_tokens + 9)
    batch.launch(
        2,
        batch.num_reqs + 1,
        max_num_tokens=slots.shape[1],
        idx_mapping=batch.with_padding(batch.idx_mapping),
        pos=batch.positions,
        block_table_ptrs=addresses(tables),
        block_table_strides=torch.tensor([16, 4]),
        block_sizes=ints([4, 16]),
        slot_mapping_enabled=batch.ints(0, 3, 2).bool(),
        dcp_sharded=torch.zeros(2, dtype=torch.bool),
        slot_mappings=slots,
        cp_rank=0,
        CP_SIZE=1,
        CP_INTERLEAVE=1,
        PAD_ID=-1,
        TRITON_BLOCK_SIZE=8,
    )
    return slots


@plays("utils:_zero_kv_blocks_kernel")
def _(batch: Batch) -> object:
    caches = [torch.ones(8, 6), torch.ones(8, 20, dtype=torch.bfloat16)]
    batch.launch(
        *(batch.num_reqs, 2, 3),
        seg_addrs=torch.tensor([one.data_ptr() for one in caches], dtype=torch.uint64),
        seg_block_strides=torch.tensor([6, 10]),
        seg_page_sizes=torch.tensor([5, 10]),
        block_ids=torch.tensor(batch.draw.sample(range(8), batch.num_reqs), dtype=torch.int64),
    )
    return caches


SCAN, FINALIZE = (f"gpu.spec_decode.ngram.speculator:_ngram_{part}_kernel" for part in ("scan", "finalize"))


@plays(SCAN, FINALIZE)
def _(batch: Batch) -> object:
    if batch.num_reqs == 0:  # no step drafts for nobody
        return ()
    least = batch.draw.randint(1, 3)
    drafts, scratch = batch.long_tokens(MAX_REQUESTS, 5), batch.long_tokens(MAX_REQUESTS, 4)
    common = {
        "token_ids": batch.ints(0, batch.draw.choice((2, 4, 50)), MAX_REQUESTS, MAX_LENGTH),
        "total_len": batch.ints(1, MAX_LENGTH + 1, MAX_REQUESTS),
        "num_sampled": batch.ints(0, 3, batch.num_reqs),
        "scratch": scratch,
        "L": MAX_LENGTH,
    }
    sizes = {"MIN_N": least, "MAX_N": least + batch.draw.randrange(3), "MAX_N_PO2": 8, "BLOCK_L": 16}
    batch.launch(batch.num_reqs, 4, kernel=SCAN, **common, **sizes)
    best = scratch[: batch.num_reqs].amax(1)
    sizes = {"N_BLOCKS": 4, "N_BLOCKS_PO2": 4, "K": 5, "K_PO2": 8}
    last = batch.long_tokens(MAX_REQUESTS)
    batch.launch(batch.num_reqs, kernel=FINALIZE, **common, **sizes, last_sampled=last, drafts=drafts)
    return best, drafts


@plays("gpu.spec_decode.standalone_ar.speculator:_prepare_prefill_inputs_kernel")
def _(batch: Batch) -> object:
    if batch.num_reqs == 0:
        return ()
    return batch.launch(
        batch.num_reqs,
        target_input_ids=batch.tokens(batch.num_tokens),
        last_sampled=batch.tokens(MAX_REQUESTS),
        out_input_ids=batch.tokens(batch.num_tokens + batch.num_reqs),
        out_positions=batch.long_tokens(batch.num_tokens + batch.num_reqs),
        last_token_indices=batch.long_tokens(MAX_REQUESTS),
        out_query_start_loc=batch.tokens(MAX_REQUESTS + 1),
        out_seq_lens=batch.tokens(MAX_REQUESTS),
    )


DEPENDENT: Final = "gpu.spec_decode.target_dependent_ar.speculator"


@plays(f"{DEPENDENT}:_prepare_prefill_inputs_kernel")
def _(batch: Batch) -> object:
    if batch.num_reqs == 0:
        return ()
    return batch.launch(
        batch.num_reqs,
        last_token_indices=batch.long_tokens(MAX_REQUESTS),
        draft_current_step=torch.tensor(3),
        draft_input_ids=batch.tokens(batch.num_tokens + 3),
        draft_positions=batch.long_tokens(batch.num_tokens + 3),
        draft_query_start_loc=batch.tokens(MAX_REQUESTS + 1),
        draft_seq_lens=batch.tokens(MAX_REQUESTS),
        target_input_ids=batch.tokens(batch.num_tokens),
        last_sampled=batch.long_tokens(MAX_REQUESTS),
        next_prefill_tokens=batch.tokens(MAX_REQUESTS),
    )


@plays(f"{DEPENDENT}:_prepare_decode_inputs_kernel")
def _(batch: Batch) -> object:
    return batch.launch(
        batch.num_reqs + 1,
        draft_tokens=batch.long_tokens(batch.num_reqs, batch.num_speculative_steps),
        target_seq_lens=batch.seq_lens,
        seq_lens=batch.tokens(MAX_REQUESTS),
        input_ids=batch.tokens(MAX_REQUESTS),
        positions=batch.ints(0, 30, MAX_REQUESTS, dtype=torch.int64),
        sample_src_positions=batch.long_tokens(MAX_REQUESTS),
        query_start_loc=batch.tokens(MAX_REQUESTS + 1),
        ADVANCE_DRAFT_POSITIONS=batch.draw.random() < 0.7,
    )


@plays(f"{DEPENDENT}:_update_draft_inputs_kernel")
def _(batch: Batch) -> object:
    return batch.launch(
        batch.num_reqs,
        output_draft_tokens=batch.long_tokens(MAX_REQUESTS, batch.num_speculative_steps),
        draft_tokens=batch.long_tokens(MAX_REQUESTS),
        next_input_hidden_states=batch.logits(MAX_REQUESTS),
        hidden_states=batch.logits(MAX_REQUESTS),
        hidden_size=batch.vocab_size,
        input_ids=batch.tokens(MAX_REQUESTS),
        positions=batch.ints(0, 30, MAX_REQUESTS, dtype=torch.int64),
        sample_src_positions=batch.long_tokens(MAX_REQUESTS),
        seq_lens=batch.ints(1, 30, MAX_REQUESTS),
        current_draft_step=torch.tensor(batch.draw.randrange(batch.num_speculative_steps)),
        BLOCK_SIZE=64,
        ADVANCE_DRAFT_POSITIONS=batch.draw.random() < 0.7,
    )


@plays("gpu.sample.gumbel:_temperature_kernel")
def _(batch: Batch) -> object:
    logits = batch.logits()
    of("gpu.sample.gumbel").apply_temperature(logits, batch.expanded_idx_mapping, batch.temperatures)
    return logits


@plays("gpu.sample.gumbel:_gumbel_sample_kernel")
def _(batch: Batch) -> object:
    is_drafting, has_columns = batch.draw.random() < 0.5, batch.draw.random() < 0.5
    requests = batch.with_padding(batch.idx_mapping if is_drafting else batch.expanded_idx_mapping)
    cache, columns = torch.zeros(MAX_REQUESTS, 4, batch.vocab_size + 3), batch.ints(0, 4, len(requests))
    sampled = of("gpu.sample.gumbel").gumbel_sample(
        batch.logits(len(requests)),
        requests,
        batch.temperatures,
        batch.seeds,
        batch.ints(0, 1 << 20, len(requests), dtype=torch.int64),
        apply_temperature=batch.draw.random() < 0.7,
        is_drafting=is_drafting,
        logits_cache=cache if is_drafting else None,
        logits_cache_col=columns if has_columns else torch.tensor(2),
    )
    return sampled, cache


@plays("gpu.input_batch:_prepare_prefill_inputs_kernel")
def _(batch: Batch) -> object:
    return batch.launch(
        batch.num_reqs,
        input_ids=batch.tokens(batch.num_tokens + 3),
        next_prefill_tokens=batch.tokens(3, MAX_REQUESTS),
        num_lookahead=3,
        LOOKAHEAD_BLOCK=4,
    )


@plays("gpu.input_batch:_prepare_pos_seq_lens_kernel")
def _(batch: Batch) -> object:
    pos, seq_lens = batch.long_tokens(batch.num_tokens + 3), batch.tokens(MAX_REQUESTS)
    return batch.launch(batch.num_reqs + 1, pos=pos, seq_lens=seq_lens)


@plays("gpu.input_batch:_combine_sampled_and_draft_tokens_kernel")
def _(batch: Batch) -> object:
    return batch.launch(
        batch.num_reqs,
        input_ids=batch.tokens(batch.num_tokens + 3),
        last_sampled_tokens=batch.long_tokens(MAX_REQUESTS, 1),
        draft_tokens=batch.long_tokens(MAX_REQUESTS, batch.num_speculative_steps + 1),
        logits_indices=batch.long_tokens(batch.num_logits),
        BLOCK_SIZE=8,
        NUM_NEW_SAMPLED_TOKENS=batch.draw.choice((0, 1, 1)),
    )


@plays("gpu.input_batch:_get_num_sampled_and_rejected_kernel")
def _(batch: Batch) -> object:
    nums = batch.ints(1, 2, batch.num_reqs)
    return batch.launch(batch.num_reqs, num_sampled=nums, num_rejected=torch.full_like(nums, 9))


@plays("gpu.input_batch:_post_update_kernel")
def _(batch: Batch) -> object:
    return batch.launch(
        batch.num_reqs,
        idx_mapping=batch.with_padding(batch.idx_mapping),
        last_sampled_tokens=batch.long_tokens(MAX_REQUESTS, 1),
        output_bin_counts=batch.draw.choice((None, batch.ints(0, 3, MAX_REQUESTS, batch.vocab_size))),
        sampled_tokens=batch.sampled,
        query_start_loc=batch.draw.choice((None, batch.query_start_loc)),
    )


@plays("gpu.input_batch:_post_update_num_computed_tokens_kernel")
def _(batch: Batch) -> object:
    return batch.launch(batch.num_reqs)


@plays("gpu.input_batch:_expand_idx_mapping_kernel")
def _(batch: Batch) -> object:
    rows, places = batch.tokens(batch.num_logits), batch.tokens(batch.num_logits)
    return batch.launch(batch.num_reqs, expanded_idx_mapping=rows, expanded_local_pos=places, BLOCK_SIZE=8)


@plays("gpu.sample.logit_bias:_bias_kernel")
def _(batch: Batch) -> object:
    def distinct(num: int) -> torch.Tensor:
        return torch.stack(
            [ints(batch.draw.sample(range(batch.vocab_size), num)) for _ in range(MAX_REQUESTS)]
        )

    allowed, stops = distinct(9), distinct(6)
    allowed[::2, :3] = stops[::2, :3]
    return batch.launch(
        batch.num_logits,
        logits=batch.logits(),
        num_allowed_token_ids=batch.counts(0, 0, 3, 9),
        allowed_token_ids=allowed,
        num_logit_bias=batch.counts(0, 0, 2, 8),
        bias_token_ids=distinct(8),
        bias=batch.logits(MAX_REQUESTS)[:, :8],
        pos=batch.positions[batch.logits_indices],
        min_lens=batch.ints(0, 40, MAX_REQUESTS),
        num_stop_token_ids=batch.counts(0, 3, 6),
        restore_when_all_masked=batch.counts(0, 1),
        stop_token_ids=stops,
        BLOCK_SIZE=16,
        LOGITS_BLOCK_SIZE=64,
        CHECK_ALL_MASKED_ROWS=batch.draw.random() < 0.7,
    )


@plays("gpu.structured_outputs:_apply_grammar_bitmask_kernel")
def _(batch: Batch) -> object:
    stride, logits = batch.num_speculative_steps + 1, batch.logits()
    with_grammar = [one for one in range(batch.num_reqs) if batch.draw.random() < 0.7]
    mapping = ints([one * stride + place for one in with_grammar for place in range(stride)])
    return batch.launch(
        len(mapping),
        blocks_of(batch.vocab_size, 64),
        logits=logits,
        logits_indices=mapping,
        bitmask=batch.ints(-(2**31), 2**31, len(mapping), blocks_of(batch.vocab_size, 32)),
        MASK_STRIDE=stride,
        BLOCK_SIZE=64,
    )


@plays("gpu.sample.logprob:_topk_log_softmax_kernel", "gpu.sample.logprob:_ranks_kernel")
def _(batch: Batch) -> object:
    logits, sampled = batch.logits(), batch.long_tokens(batch.num_logits)
    logits[:, 1:3] = -torch.inf
    sampled[(sampled == 1) | (sampled == 2)] = 0  # the kernel counts its padding as equally likely
    return of("gpu.sample.logprob").compute_topk_scores(logits, batch.draw.choice((0, 1, 5)), sampled)[:3]


@plays("gpu.sample.logprob:_fill_logprob_token_ids_kernel")
def _(batch: Batch) -> object:
    num_topk, ids = batch.draw.randrange(4), torch.zeros(batch.num_logits, 7, dtype=torch.int64)
    return batch.launch(
        batch.num_logits,
        out_token_ids=ids,
        out_valid_mask=torch.zeros_like(ids, dtype=torch.bool),
        sampled_token_ids=batch.long_tokens(batch.num_logits),
        topk_indices=batch.tokens(batch.num_logits, max(num_topk, 1)),
        num_per_req_token_ids=batch.counts(0, 0, 2, 6),
        per_req_token_ids=batch.tokens(MAX_REQUESTS, 8),
        NUM_TOPK=num_topk,
        PADDED_COLS=8,
    )


@plays("gpu.sample.prompt_logprob:_prompt_logprobs_token_ids_kernel")
def _(batch: Batch) -> object:
    return batch.launch(batch.num_reqs, prompt_logprobs_token_ids=batch.long_tokens(batch.num_tokens))


@plays("gpu.metrics.logits:_num_nans_kernel")
def _(batch: Batch) -> object:
    logits = batch.logits()
    logits[:, ::3] = torch.where(logits[:, ::3] > 0, torch.nan, torch.inf)
    return of("gpu.metrics.logits").get_num_nans(logits)


@plays("gpu.sample.output:_compact_sampling_mask_kernel")
def _(batch: Batch) -> object:
    logits, num_slots = batch.logits(), batch.num_speculative_steps + 1
    logits[logits < 1] = -torch.inf
    logits[:, 5:7] = torch.tensor([torch.inf, torch.nan])
    ids, mask, counts, *_ = of("gpu.sample.output").SamplingMaskTensors.from_logits(
        logits, batch.cu_num_logits, batch.num_sampled, batch.draw.choice((4, 50)), num_slots
    )
    kept = [row[: min(num, len(row))] for row, num in zip(ids, counts.tolist(), strict=True)]
    return counts, mask[counts > 0], kept


@plays("gpu.model_states.mamba_hybrid:preprocess_mamba_align_fused_kernel")
def _(batch: Batch) -> object:
    return batch.launch(
        2,
        state_idx=batch.ints(-1, 4, MAX_REQUESTS),
        num_accepted_tokens=batch.ints(0, 4, MAX_REQUESTS),
        src_col=batch.tokens(MAX_REQUESTS),
        src_off=batch.tokens(MAX_REQUESTS),
        MAMBA_BLOCK_SIZE=8,
    )


COPIES: Final = "mamba_utils:precopy_mamba_align_fused_kernel", "mamba_utils:postprocess_mamba_fused_kernel"


@plays(*COPIES)
def _(batch: Batch) -> object:
    is_dim_first, width, channels, num_columns = batch.draw.random() < 0.5, 5, 3, 6
    page = torch.randn(MAX_REQUESTS * num_columns, 64, generator=batch.generator)
    states = page, page[:, 20:44]  # a window at the page's start, and another state
    tables = torch.randperm(len(page), generator=batch.generator).view(MAX_REQUESTS, num_columns).int()
    layout = {
        "block_table_ptrs": torch.tensor([tables.data_ptr()]),
        "block_table_stride_req": num_columns,
        "state_base_addrs": torch.tensor([state.data_ptr() for state in states]),
        "state_block_strides": torch.tensor([256, 256]),
        "state_elem_sizes": ints([4, 4]),
        "state_inner_sizes": torch.tensor([1 if is_dim_first else channels, 24]),
        "state_conv_widths": ints([width, 0]),
        "state_group_indices": ints([0, 0]),
        "state_dim_row_count": ints([channels if is_dim_first else 0, 0]),
        "state_dim_row_stride": torch.tensor([4 * width if is_dim_first else 0, 0]),
        "idx_mapping": batch.with_padding(batch.idx_mapping),
        "CONV_STATE_DIM_FIRST": is_dim_first,
        "HAS_IDX_MAPPING": True,
        "TEMPORAL_TILES": 2,
    }
    grid, accepted = (batch.num_reqs, 2, 2), batch.ints(1, 4, MAX_REQUESTS)
    computed = 8 * batch.ints(1, 5, MAX_REQUESTS) + batch.ints(0, 4, MAX_REQUESTS)
    batch.launch(
        *grid,
        kernel=COPIES[0],
        mamba_state_idx=batch.ints(0, 4, MAX_REQUESTS),
        src_col=batch.ints(-1, 4, MAX_REQUESTS),
        token_bias=batch.ints(0, 3, MAX_REQUESTS),
        **layout,
    )
    written = accepted.clone()
    batch.launch(
        *grid,
        kernel=COPIES[1],
        num_accepted_tokens=accepted,
        num_accepted_tokens_out=written,
        mamba_state_idx=((computed - accepted) // 8).int(),
        num_computed_tokens=computed,
        num_scheduled_tokens=None,
        num_draft_tokens=None,
        block_size=8,
        PRECOMPUTED_NEW_COMPUTED=True,
        **layout,
    )
    return page, written


@plays("gpu.mm.rope:_prepare_rope_positions_kernel")
def _(batch: Batch) -> object:
    num_dims = batch.draw.choice((3, 4))
    return batch.launch(
        batch.num_reqs,
        positions=batch.long_tokens(num_dims, batch.num_tokens + 3),
        prefill_positions=batch.tokens(num_dims * MAX_REQUESTS, MAX_LENGTH),
        prefill_positions_stride0=num_dims * MAX_LENGTH,
        prefill_positions_stride1=MAX_LENGTH,
        prefill_delta=batch.ints(-5, 5, MAX_REQUESTS),
        NUM_DIMS=num_dims,
    )


@plays("gpu.model_states.prompt_embeds:_apply_prompt_embeds_kernel")
def _(batch: Batch) -> object:
    given = [torch.randn(20, batch.vocab_size, generator=batch.generator) for _ in range(MAX_REQUESTS)]
    masks, has_mask = batch.ints(0, 2, MAX_REQUESTS, 20).bool(), batch.counts(0, 1).tolist()
    addresses_of_masks = [one.data_ptr() * has for one, has in zip(masks, has_mask, strict=True)]
    return batch.launch(
        batch.num_reqs,
        8,
        inputs_embeds=torch.zeros(batch.num_tokens, batch.vocab_size + 3)[:, : batch.vocab_size],
        embeds_ptrs=torch.tensor([one.data_ptr() for one in given], dtype=torch.uint64),
        mask_ptrs=torch.tensor(addresses_of_masks, dtype=torch.uint64),
        embeds_lens=batch.counts(0, 4, 9, 20),
        hidden_size=batch.vocab_size,
        TOKEN_BLOCK=4,
        BLOCK_SIZE=64,
    )[:1]


@plays("gpu.model_states.mamba_hybrid:_scatter_num_accepted_kernel")
def _(batch: Batch) -> object:
    requests, nums = batch.with_padding(batch.idx_mapping), batch.tokens(MAX_REQUESTS)
    return batch.launch(batch.num_reqs, idx_mapping=requests, num_accepted=nums)


@plays("gpu.model_states.mamba_hybrid:_fill_num_accepted_kernel")
def _(batch: Batch) -> object:
    requests, nums = batch.with_padding(batch.idx_mapping), batch.tokens(MAX_REQUESTS)
    return batch.launch(batch.num_reqs, idx_mapping=requests, num_accepted=nums, num_sampled=3)


@plays("gpu.sample.min_p:_min_p_kernel")
def _(batch: Batch) -> object:
    return batch.launch(batch.num_logits, logits=batch.logits(), min_p=batch.chosen(0.0, 0.05, 0.4, 1.0))


@plays("gpu.sample.penalties:_penalties_kernel", "gpu.sample.penalties:_bincount_kernel")
def _(batch: Batch) -> object:
    penalties, logits, new = (
        of("gpu.sample.penalties"),
        batch.logits(),
        batch.idx_mapping[: batch.num_reqs // 2],
    )
    mask = batch.ints(-(2**31), 2**31, MAX_REQUESTS, blocks_of(batch.vocab_size, 32))
    counts = batch.ints(0, 3, MAX_REQUESTS, batch.vocab_size)
    penalties.bincount(new, batch.all_token_ids, batch.prompt_len, batch.prefill_len, mask, counts, 32)
    penalties.apply_penalties(
        logits,
        batch.expanded_idx_mapping,
        batch.tokens(batch.num_logits),
        batch.expanded_local_pos,
        batch.chosen(0.6, 1.0, 1.4),
        batch.chosen(-0.5, 0.0, 0.9),
        batch.chosen(-0.5, 0.0, 0.9),
        mask,
        counts,
    )
    return logits, mask, counts


@plays("gpu.sample.bad_words:_bad_words_kernel")
def _(batch: Batch) -> object:
    sizes = [[batch.draw.randint(1, 4) for _ in range(5)] for _ in range(MAX_REQUESTS)]
    return batch.launch(
        batch.num_logits,
        5,
        logits=batch.logits(),
        bad_word_token_ids=batch.ints(0, 2, MAX_REQUESTS, 20),
        bad_word_offsets=torch.stack([ints([0, *itertools.accumulate(one)]) for one in sizes]),
        num_bad_words=batch.counts(0, 1, 5),
        all_token_ids=batch.ints(0, 2, MAX_REQUESTS, MAX_LENGTH),
        input_ids=batch.ints(0, 2, batch.num_logits),
    )


@plays("gpu.sample.trace_replay:_trace_replay_kernel")
def _(batch: Batch) -> object:
    return batch.launch(
        batch.num_reqs,
        sampled=batch.long_tokens(batch.num_reqs),
        idx_mapping=batch.with_padding(batch.idx_mapping),
        trace_token_ids=batch.all_token_ids,
        trace_len=batch.counts(0, 3, 30),
        prompt_len=batch.ints(1, 24, MAX_REQUESTS),
    )


THINKING: Final = "gpu.sample.thinking_budget"


@plays(f"{THINKING}:_update_committed_marker_cache_kernel", f"{THINKING}:_thinking_budget_kernel")
def _(batch: Batch) -> object:
    ids, drafts = batch.ints(0, 3, MAX_REQUESTS, MAX_LENGTH), batch.ints(0, 3, batch.num_logits)
    found = [torch.full((MAX_REQUESTS,), num, dtype=torch.int32) for num in (-1, -1, 0)]
    markers = [batch.ints(0, 3, batch.draw.randint(1, 3)) for _ in range(3)]
    budgets, steps = batch.counts(-1, 0, 2, 7), []
    for _ in range(3):  # the kernel keeps what it found for the next steps
        steps.append(batch.logits())
        of(THINKING).apply_thinking_budget(
            steps[-1],
            batch.idx_mapping,
            batch.expanded_idx_mapping,
            budgets,
            ids,
            batch.total_len,
            drafts,
            batch.expanded_local_pos,
            *found,
            *markers,
        )
        batch.total_len += 2
    return steps


JUDGE: Final = "gpu.spec_decode.rejection_sampler"


@plays(f"{JUDGE}:_flatten_sampled_kernel")
def _(batch: Batch) -> object:
    return batch.launch(batch.num_reqs, flat_sampled=batch.long_tokens(batch.num_logits))


@plays(f"{JUDGE}:_gather_draft_sampled_kernel")
def _(batch: Batch) -> object:
    tokens, pos = batch.tokens(batch.num_logits), batch.long_tokens(batch.num_logits)
    ids, num_blocks = batch.tokens(batch.num_tokens), blocks_of(batch.num_logits, batch.block_size)
    return batch.launch(num_blocks, draft_sampled=tokens, pos=pos, input_ids=ids)


@plays(
    f"{JUDGE}_utils:_compute_local_logits_stats_kernel",
    f"{JUDGE}_utils:_rejection_kernel",
    f"{JUDGE}_utils:_resample_kernel",
    f"{JUDGE}_utils:_insert_resampled_kernel",
)
def _(batch: Batch) -> object:
    target, num_drafted = batch.logits(), batch.vocab_size - batch.draw.choice((0, 3))
    target[target < -4] = -torch.inf
    draft_logits = batch.logits(MAX_REQUESTS, batch.num_speculative_steps)[..., :num_drafted]
    tokens = batch.tokens(batch.num_logits).clamp(max=num_drafted - 1)
    is_best = batch.ints(0, 2, batch.num_logits).bool()[1:]
    tokens[1:] = torch.where(is_best, target[:, :num_drafted].argmax(-1).int()[:-1], tokens[1:])
    is_draft = batch.expanded_local_pos > 0
    tokens[is_draft] = batch.with_padding(tokens[is_draft])
    rates = torch.linspace(0.9, 0.5, batch.num_speculative_steps)
    sampled, nums = of(f"{JUDGE}_utils").rejection_sample(
        target,
        batch.draw.choice((None, draft_logits)),
        tokens,
        batch.cu_num_logits,
        batch.positions[batch.logits_indices],
        batch.idx_mapping,
        batch.expanded_idx_mapping,
        batch.expanded_local_pos,
        batch.temperatures,
        batch.seeds,
        batch.num_speculative_steps,
        rates if batch.draw.random() < 0.2 else None,
    )
    return [row[:num] for row, num in zip(sampled, nums, strict=True)], nums


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value.clone()
    else:
        for one in value:
            yield from tensors_of(one)


def played(names: list[str], num_seeds: int) -> Mapping[tuple[str, int], list[torch.Tensor]]:
    return {
        (name, seed): [*tensors_of(CASES[name](Batch(name, seed)))]
        for name in names
        for seed in range(num_seeds)
    }


def interpret() -> None:
    """Have vLLM find a Triton for CPUs, which is the interpreter."""
    from triton import language as tl  # noqa: PLC0415 - decides by the environment at its import
    from triton.backends import backends  # noqa: PLC0415
    from triton.runtime import interpreter  # noqa: PLC0415

    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def as_bool(mask: Any) -> Any:
        """Masks may be integers in vLLM's kernels; the interpreter takes booleans alone."""
        return interpreter.TensorHandle(mask.data.astype(bool), mask.dtype)

    builder.create_masked_load = lambda self, at, mask, *rest: load(self, at, as_bool(mask), *rest)
    builder.create_masked_store = lambda self, at, value, mask, *rest: store(
        self, at, value, as_bool(mask), *rest
    )
    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))

    def log1p(value: Any) -> Any:
        """Take the place of a function of GPUs, which the interpreter does not have."""
        return tl.tensor(
            interpreter.TensorHandle(np.log1p(value.handle.data), value.handle.dtype), value.type
        )

    of("gpu.spec_decode.rejection_sampler_utils").tldevice = SimpleNamespace(log1p=log1p)
    of("gpu.metrics.logits").libdevice = SimpleNamespace(isnan=lambda value: value != value)


def main() -> int:
    interpret()
    from vllm.triton_utils import HAS_TRITON  # noqa: PLC0415

    from nnsight_engine.vllm_backend.cpu_kernels.install import (  # noqa: PLC0415
        FUNCTIONS,
        V2CpuPlatform,
        module_of,
    )

    assert HAS_TRITON
    assert CASES.keys() == FUNCTIONS.keys(), CASES.keys() ^ FUNCTIONS.keys()
    for name in FUNCTIONS:
        module, attribute = module_of(name)
        PARAMETERS[name] = tuple(inspect.signature(getattr(module, attribute).fn).parameters)
    num_seeds, chosen = int(sys.argv[1]), sys.argv[2:]
    names = [name for name in CASES if not chosen or name in chosen]
    expected = played(names, num_seeds)
    V2CpuPlatform.register_triton_kernel_overrides()
    is_equal = True
    for case, values in played(names, num_seeds).items():
        try:
            torch.testing.assert_close(values, expected[case], rtol=1e-5, atol=1e-5, equal_nan=True)
        except AssertionError as error:
            is_equal = False
            print(*case, error, sep="\n")  # noqa: T201 - read by the test, and by people
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
