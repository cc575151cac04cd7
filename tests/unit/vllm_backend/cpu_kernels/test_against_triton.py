"""Every function for CPUs beside its kernel in Triton's interpreter, on random batches.

Triton decides at its import whether kernels are interpreted, and vLLM whether it has Triton. So the comparison
is a process of its own: this module's ``main``, which also runs by itself, with the names of kernels.
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

NUM_SEEDS: Final = 12
MAX_REQUESTS, MAX_LENGTH = 7, 64
WORKER: Final = "vllm.v1.worker."


@pytest.mark.heavy
def test_functions_equal_tritons_kernels() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.vllm_backend.cpu_kernels.test_against_triton"],
        env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]


class Batch:
    """A random batch: requests within their prompts, at the end of them and generating, some with drafts.

    Attributes:
        lengths: Tokens of each request in this step, of which the last ``nums_logits`` have logits.
    """

    def __init__(self, seed: str) -> None:
        self.draw = draw = random.Random(seed)
        self.generator = torch.Generator().manual_seed(draw.getrandbits(32))
        self.vocabulary = draw.choice((33, 70, 1100))
        self.num_reqs = draw.randrange(5)
        self.num_steps = draw.randint(1, 4)
        requests = draw.sample(range(MAX_REQUESTS), self.num_reqs)
        self.prompt_len, self.prefill_len, self.num_computed, self.total_len = (
            torch.full((MAX_REQUESTS,), 5, dtype=torch.int32) for _ in range(4)
        )
        self.lengths, self.nums_logits = [], []
        for request in requests:
            prompt = draw.randint(1, 20)
            prefill = prompt + draw.choice((0, 0, 1, 5))
            num_drafts = draw.choice((0, self.num_steps, draw.randint(0, self.num_steps)))
            kind = draw.choice(("prompt", "its end", "generates", "generates"))
            if kind == "prompt":
                computed = draw.randrange(prefill)
                self.lengths.append(draw.randint(1, prefill - computed))
                self.nums_logits.append(1)
            else:  # the end of a prompt may have drafts that nobody made
                computed = prefill - 1 if kind == "its end" else prefill + draw.randrange(6)
                self.lengths.append(1 + num_drafts)
                self.nums_logits.append(1 + num_drafts)
            self.prompt_len[request], self.prefill_len[request] = prompt, prefill
            self.num_computed[request], self.total_len[request] = computed, max(computed + 1, prefill)
        self.idx_mapping = ints(requests)
        self.query_start_loc = ints([0, *itertools.accumulate(self.lengths)])
        self.cu_num_logits = ints([0, *itertools.accumulate(self.nums_logits)])
        self.num_tokens, self.num_logits = sum(self.lengths), sum(self.nums_logits)
        self.seq_lens = self.num_computed[self.idx_mapping] + ints(self.lengths)
        self.expanded = ints([one for one, num in zip(requests, self.nums_logits, strict=True) for _ in range(num)])
        self.places = ints([place for num in self.nums_logits for place in range(num)])
        ends = itertools.accumulate(self.lengths)
        self.logits_indices = torch.tensor(
            [end - num + at for end, num in zip(ends, self.nums_logits, strict=True) for at in range(num)],
            dtype=torch.int64,
        )
        self.positions = torch.tensor(
            [
                int(self.num_computed[one]) + place
                for one, length in zip(requests, self.lengths, strict=True)
                for place in range(length)
            ],
            dtype=torch.int64,
        )
        self.temperatures = self.chosen((0.0, 0.7, 1.0, 1.6))
        self.seeds = self.ints(-(2**62), 2**62, MAX_REQUESTS, dtype=torch.int64)
        self.all_token_ids = self.tokens(MAX_REQUESTS, MAX_LENGTH)

    def ints(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """Return numbers from ``low`` to ``high``, excluded."""
        return torch.randint(low, high, shape, generator=self.generator, dtype=torch.int64).to(dtype)

    def tokens(self, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return self.ints(0, self.draw.choice((4, self.vocabulary)), *shape, dtype=dtype)

    def logits(self, *shape: int) -> torch.Tensor:
        """Return logits, whose rows do not follow each other in memory."""
        wide = torch.randn(*shape, self.vocabulary + 5, generator=self.generator)
        return 3 * wide[..., : self.vocabulary]

    def row_logits(self) -> torch.Tensor:
        padded = torch.zeros(self.num_logits, self.vocabulary + 5)
        padded[:, : self.vocabulary] = self.logits(self.num_logits)
        return padded[:, : self.vocabulary]

    def chosen(self, values: tuple[float, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return one of these values for each request that there could be."""
        return torch.tensor(self.draw.choices(values, k=MAX_REQUESTS), dtype=dtype)

    def with_padding(self, values: torch.Tensor) -> torch.Tensor:
        """Return values of which some, in a batch with padding, are -1."""
        is_padding = self.ints(0, 4, len(values)) == 0
        return values.masked_fill(is_padding, -1)

    def sampled(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return sampled tokens and their numbers, of which requests within their prompts have none."""
        nums = [
            0 if length < prefill else self.draw.randint(1, num)
            for length, prefill, num in zip(
                self.seq_lens.tolist(), self.prefill_len[self.idx_mapping].tolist(), self.nums_logits, strict=True
            )
        ]
        return self.tokens(self.num_reqs, self.num_steps + 1, dtype=torch.int64), ints(nums)

    def num_rejected(self) -> torch.Tensor:
        return ints([self.draw.randrange(num) for num in self.nums_logits])


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def of(module: str) -> Any:
    return importlib.import_module(WORKER + module)


Case = Callable[[Batch], object]
CASES: Final[dict[str, Case]] = {}
"""What plays each kernel on a batch and returns all tensors that it could have written."""


def plays(*names: str) -> Callable[[Case], Case]:
    def register(case: Case) -> Case:
        CASES.update(dict.fromkeys(names, case))
        return case

    return register


def launch(name: str, grid: tuple[int, ...], **given: Any) -> list[torch.Tensor]:
    """Launch a kernel with arguments by name, without ``_ptr``; strides are those of the given tensors."""
    module, _, attribute = name.partition(":")
    kernel = getattr(of(module), attribute)
    arguments = {}
    for parameter in PARAMETERS[name]:
        plain = parameter.removesuffix("_ptr")
        if plain in given:
            arguments[parameter] = given.pop(plain)
        elif "_stride" in parameter:
            owner, _, dim = parameter.partition("_stride")
            source = arguments.get(owner, arguments.get(f"{owner}_ptr"))
            arguments[parameter] = 0 if source is None else source.stride(int(dim.strip("_") or 0))
    assert not given, f"{name} has no parameters {', '.join(given)}"
    kernel[grid](**arguments)
    return [value for value in arguments.values() if isinstance(value, torch.Tensor)]


PARAMETERS: Final[dict[str, tuple[str, ...]]] = {}


def blocks_of(count: int, size: int) -> int:
    return -(-count // size)


def addresses(tensors: list[torch.Tensor]) -> Any:
    """Return block tables as vLLM gives them to kernels: their addresses, or after ``install`` themselves."""
    return of("gpu.block_table").BlockTables._make_ptr_tensor(SimpleNamespace(device="cpu"), tensors)  # noqa: SLF001


@plays("gpu.buffer_utils:_apply_write_kernel")
def _(batch: Batch) -> object:
    is_fused, num_writes = batch.draw.random() < 0.5, batch.draw.randrange(5)
    lengths = [batch.draw.randrange(6) for _ in range(num_writes)]
    ends = [*itertools.accumulate(lengths)]
    tables = [batch.tokens(MAX_REQUESTS, width) for width in (12, 16)]
    given = {
        "write_indices": ints(batch.draw.sample(range(MAX_REQUESTS), num_writes)),
        "write_starts": batch.ints(0, 6, num_writes),
        "write_contents": batch.tokens(sum(lengths)),
        "write_cu_lens": ints(ends),
        "write_group_ids": batch.ints(0, 2, num_writes) if is_fused else None,
        "output": addresses(tables) if is_fused else tables[0],
    }
    if is_fused:
        given["output_stride"] = torch.tensor([12, 16])
    launch("gpu.buffer_utils:_apply_write_kernel", (num_writes,), **given, BLOCK_SIZE=4, MULTI_GROUP=is_fused)
    return tables


@plays("gpu.block_table:_gather_block_tables_kernel")
def _(batch: Batch) -> object:
    sources, targets = ([batch.tokens(MAX_REQUESTS, width) for width in (9, 12)] for _ in range(2))
    launch(
        "gpu.block_table:_gather_block_tables_kernel", (2, batch.num_reqs + batch.draw.randrange(3)),
        batch_idx_to_req_idx=batch.idx_mapping, src_block_table_ptrs=addresses(sources),
        dst_block_table_ptrs=addresses(targets), block_table_strides=torch.tensor([9, 12]),
        num_blocks=batch.ints(0, 10, 2, MAX_REQUESTS), num_reqs=batch.num_reqs, BLOCK_SIZE=4,
    )  # fmt: skip
    return targets


@plays("gpu.block_table:_compute_slot_mappings_kernel")
def _(batch: Batch) -> object:
    tables, sizes = [batch.ints(0, 99, MAX_REQUESTS, width) for width in (16, 4)], ints([4, 16])
    slots = torch.full((2, batch.num_tokens + 9), 7, dtype=torch.int64)
    launch(
        "gpu.block_table:_compute_slot_mappings_kernel", (2, batch.num_reqs + 1),
        max_num_tokens=slots.shape[1], idx_mapping=batch.with_padding(batch.idx_mapping),
        query_start_loc=batch.query_start_loc, pos=batch.positions, block_table_ptrs=addresses(tables),
        block_table_strides=torch.tensor([16, 4]), block_sizes=sizes,
        slot_mapping_enabled=batch.ints(0, 3, 2).bool(), dcp_sharded=torch.zeros(2, dtype=torch.bool),
        slot_mappings=slots, cp_rank=0, CP_SIZE=1, CP_INTERLEAVE=1, PAD_ID=-1, TRITON_BLOCK_SIZE=8,
    )  # fmt: skip
    return slots


@plays("utils:_zero_kv_blocks_kernel")
def _(batch: Batch) -> object:
    caches = [torch.ones(8, 6), torch.ones(8, 20, dtype=torch.bfloat16)]
    blocks = torch.tensor(batch.draw.sample(range(8), batch.num_reqs), dtype=torch.int64)
    launch(
        "utils:_zero_kv_blocks_kernel", (len(blocks), 2, 2),
        seg_addrs=torch.tensor([one.data_ptr() for one in caches], dtype=torch.uint64),
        seg_block_strides=torch.tensor([6, 10]), seg_page_sizes=torch.tensor([5, 10]), block_ids=blocks, BLOCK_SIZE=8,
    )  # fmt: skip
    return caches


SCAN, FINALIZE = (f"gpu.spec_decode.ngram.speculator:_ngram_{part}_kernel" for part in ("scan", "finalize"))


@plays(SCAN, FINALIZE)
def _(batch: Batch) -> object:
    if batch.num_reqs == 0:  # no step drafts for nobody
        return ()
    least = batch.draw.randint(1, 3)
    most, num_drafts = least + batch.draw.randrange(3), batch.draw.randint(1, 5)
    common = {
        "token_ids": batch.ints(0, batch.draw.choice((2, 4, 50)), MAX_REQUESTS, MAX_LENGTH),
        "idx_mapping": batch.idx_mapping, "total_len": batch.ints(1, MAX_LENGTH + 1, MAX_REQUESTS),
        "num_sampled": batch.ints(0, 3, batch.num_reqs), "L": MAX_LENGTH,
        "scratch": batch.ints(0, 99, MAX_REQUESTS, 4, dtype=torch.int64),
    }  # fmt: skip
    launch(SCAN, (batch.num_reqs, 4), **common, MIN_N=least, MAX_N=most, MAX_N_PO2=8, BLOCK_L=16)
    best = common["scratch"][: batch.num_reqs].amax(1)
    drafts = torch.full((MAX_REQUESTS, num_drafts), -5, dtype=torch.int64)
    launch(
        FINALIZE, (batch.num_reqs,), **common, last_sampled=batch.tokens(MAX_REQUESTS, dtype=torch.int64),
        drafts=drafts, N_BLOCKS=4, K=num_drafts, K_PO2=8, N_BLOCKS_PO2=4,
    )  # fmt: skip
    return best, drafts


STANDALONE: Final = "gpu.spec_decode.standalone_ar.speculator:_prepare_prefill_inputs_kernel"
DEPENDENT: Final = "gpu.spec_decode.target_dependent_ar.speculator:"


@plays(STANDALONE)
def _(batch: Batch) -> object:
    num_outputs = batch.num_tokens + batch.num_reqs
    return launch(
        STANDALONE, (batch.num_reqs,), target_input_ids=batch.tokens(batch.num_tokens),
        target_positions=batch.positions, last_sampled=batch.tokens(MAX_REQUESTS), idx_mapping=batch.idx_mapping,
        out_input_ids=batch.tokens(num_outputs), out_positions=batch.tokens(num_outputs, dtype=torch.int64),
        last_token_indices=batch.tokens(MAX_REQUESTS, dtype=torch.int64),
        out_query_start_loc=batch.tokens(MAX_REQUESTS + 1), out_seq_lens=batch.tokens(MAX_REQUESTS),
        query_start_loc=batch.query_start_loc, seq_lens=batch.seq_lens, num_rejected=batch.num_rejected(),
        max_num_reqs=MAX_REQUESTS, max_model_len=20, BLOCK_SIZE=4,
    ) if batch.num_reqs else ()  # fmt: skip


@plays(f"{DEPENDENT}_prepare_prefill_inputs_kernel")
def _(batch: Batch) -> object:
    return launch(
        f"{DEPENDENT}_prepare_prefill_inputs_kernel", (batch.num_reqs,),
        last_token_indices=batch.tokens(MAX_REQUESTS, dtype=torch.int64), draft_current_step=torch.tensor(3),
        draft_input_ids=batch.tokens(batch.num_tokens + 3),
        draft_positions=batch.tokens(batch.num_tokens + 3, dtype=torch.int64),
        draft_query_start_loc=batch.tokens(MAX_REQUESTS + 1), draft_seq_lens=batch.tokens(MAX_REQUESTS),
        target_input_ids=batch.tokens(batch.num_tokens), target_positions=batch.positions,
        idx_mapping=batch.idx_mapping, last_sampled=batch.tokens(MAX_REQUESTS, dtype=torch.int64),
        next_prefill_tokens=batch.tokens(MAX_REQUESTS), num_sampled=batch.sampled()[1],
        num_rejected=batch.num_rejected(), query_start_loc=batch.query_start_loc, seq_lens=batch.seq_lens,
        max_num_reqs=MAX_REQUESTS, BLOCK_SIZE=4,
    ) if batch.num_reqs else ()  # fmt: skip


@plays(f"{DEPENDENT}_prepare_decode_inputs_kernel")
def _(batch: Batch) -> object:
    return launch(
        f"{DEPENDENT}_prepare_decode_inputs_kernel", (batch.num_reqs + 1,),
        draft_tokens=batch.tokens(batch.num_reqs, batch.num_steps, dtype=torch.int64),
        target_seq_lens=batch.seq_lens, num_rejected=batch.num_rejected(), input_ids=batch.tokens(MAX_REQUESTS),
        positions=batch.ints(0, 30, MAX_REQUESTS, dtype=torch.int64),
        sample_src_positions=batch.tokens(MAX_REQUESTS, dtype=torch.int64),
        query_start_loc=batch.tokens(MAX_REQUESTS + 1), seq_lens=batch.tokens(MAX_REQUESTS), max_model_len=20,
        max_num_reqs=MAX_REQUESTS, BLOCK_SIZE=4, ADVANCE_DRAFT_POSITIONS=batch.draw.random() < 0.7,
    )  # fmt: skip


@plays(f"{DEPENDENT}_update_draft_inputs_kernel")
def _(batch: Batch) -> object:
    return launch(
        f"{DEPENDENT}_update_draft_inputs_kernel", (batch.num_reqs,),
        output_draft_tokens=batch.tokens(MAX_REQUESTS, batch.num_steps, dtype=torch.int64),
        next_input_hidden_states=batch.logits(MAX_REQUESTS), hidden_states=batch.logits(MAX_REQUESTS),
        hidden_size=batch.vocabulary, input_ids=batch.tokens(MAX_REQUESTS),
        positions=batch.ints(0, 30, MAX_REQUESTS, dtype=torch.int64),
        sample_src_positions=batch.tokens(MAX_REQUESTS, dtype=torch.int64),
        seq_lens=batch.ints(1, 30, MAX_REQUESTS), draft_tokens=batch.tokens(MAX_REQUESTS, dtype=torch.int64),
        current_draft_step=torch.tensor(batch.draw.randrange(batch.num_steps)), max_model_len=20,
        num_speculative_steps=batch.num_steps, BLOCK_SIZE=64,
        ADVANCE_DRAFT_POSITIONS=batch.draw.random() < 0.7,
    )  # fmt: skip


@plays("gpu.sample.gumbel:_temperature_kernel")
def _(batch: Batch) -> object:
    logits = batch.row_logits()
    of("gpu.sample.gumbel").apply_temperature(logits, batch.expanded, batch.temperatures)
    return logits


@plays("gpu.sample.gumbel:_gumbel_sample_kernel")
def _(batch: Batch) -> object:
    is_drafting = batch.draw.random() < 0.5
    cache, columns = torch.zeros(MAX_REQUESTS, 4, batch.vocabulary + 3), batch.ints(0, 4, batch.num_logits)
    sampled = of("gpu.sample.gumbel").gumbel_sample(
        batch.row_logits(), batch.with_padding(batch.expanded), batch.temperatures, batch.seeds,
        batch.ints(0, 1 << 20, batch.num_logits, dtype=torch.int64), is_drafting=is_drafting,
        apply_temperature=batch.draw.random() < 0.7, logits_cache=cache if is_drafting else None,
        logits_cache_col=columns if batch.draw.random() < 0.5 else torch.tensor(batch.draw.randrange(4)),
    )  # fmt: skip
    return sampled, cache


@plays("gpu.input_batch:_prepare_prefill_inputs_kernel")
def _(batch: Batch) -> object:
    return launch(
        "gpu.input_batch:_prepare_prefill_inputs_kernel", (batch.num_reqs,),
        input_ids=batch.tokens(batch.num_tokens + 3), next_prefill_tokens=batch.tokens(3, MAX_REQUESTS),
        num_lookahead=3, idx_mapping=batch.idx_mapping, query_start_loc=batch.query_start_loc,
        all_token_ids=batch.all_token_ids, prefill_lens=batch.prefill_len, num_computed_tokens=batch.num_computed,
        BLOCK_SIZE=4, LOOKAHEAD_BLOCK=4,
    )  # fmt: skip


@plays("gpu.input_batch:_prepare_pos_seq_lens_kernel")
def _(batch: Batch) -> object:
    return launch(
        "gpu.input_batch:_prepare_pos_seq_lens_kernel", (batch.num_reqs + 1,),
        pos=batch.tokens(batch.num_tokens + 3, dtype=torch.int64), seq_lens=batch.tokens(MAX_REQUESTS),
        idx_mapping=batch.idx_mapping, query_start_loc=batch.query_start_loc,
        num_computed_tokens=batch.num_computed, max_num_reqs=MAX_REQUESTS, BLOCK_SIZE=4,
    )  # fmt: skip


@plays("gpu.input_batch:_combine_sampled_and_draft_tokens_kernel")
def _(batch: Batch) -> object:
    return launch(
        "gpu.input_batch:_combine_sampled_and_draft_tokens_kernel", (batch.num_reqs,),
        input_ids=batch.tokens(batch.num_tokens + 3), idx_mapping=batch.idx_mapping,
        last_sampled_tokens=batch.tokens(MAX_REQUESTS, 1, dtype=torch.int64),
        query_start_loc=batch.query_start_loc, seq_lens=batch.seq_lens, prefill_len=batch.prefill_len,
        draft_tokens=batch.tokens(MAX_REQUESTS, batch.num_steps + 1, dtype=torch.int64),
        cu_num_logits=batch.cu_num_logits, logits_indices=torch.zeros(batch.num_logits, dtype=torch.int64),
        BLOCK_SIZE=8, NUM_NEW_SAMPLED_TOKENS=batch.draw.choice((0, 1, 1)),
    )  # fmt: skip


@plays("gpu.input_batch:_get_num_sampled_and_rejected_kernel")
def _(batch: Batch) -> object:
    nums = ints([batch.draw.randint(1, num) for num in batch.nums_logits])
    return launch(
        "gpu.input_batch:_get_num_sampled_and_rejected_kernel", (batch.num_reqs,), num_sampled=nums,
        num_rejected=torch.full_like(nums, 9), seq_lens=batch.seq_lens, cu_num_logits=batch.cu_num_logits,
        idx_mapping=batch.idx_mapping, prefill_len=batch.prefill_len,
    )  # fmt: skip


@plays("gpu.input_batch:_post_update_kernel")
def _(batch: Batch) -> object:
    sampled, nums = batch.sampled()
    return launch(
        "gpu.input_batch:_post_update_kernel", (batch.num_reqs,), idx_mapping=batch.with_padding(batch.idx_mapping),
        num_computed_tokens=batch.num_computed, last_sampled_tokens=batch.tokens(MAX_REQUESTS, 1, dtype=torch.int64),
        output_bin_counts=batch.draw.choice((None, batch.ints(0, 3, MAX_REQUESTS, batch.vocabulary))),
        sampled_tokens=sampled, num_sampled=nums, num_rejected=batch.num_rejected(),
        query_start_loc=batch.draw.choice((None, batch.query_start_loc)), all_token_ids=batch.all_token_ids,
        total_len=batch.total_len,
    )  # fmt: skip


@plays("gpu.input_batch:_post_update_num_computed_tokens_kernel")
def _(batch: Batch) -> object:
    return launch(
        "gpu.input_batch:_post_update_num_computed_tokens_kernel", (batch.num_reqs,), idx_mapping=batch.idx_mapping,
        num_computed_tokens=batch.num_computed, query_start_loc=batch.query_start_loc,
    )  # fmt: skip


@plays("gpu.input_batch:_expand_idx_mapping_kernel")
def _(batch: Batch) -> object:
    return of("gpu.input_batch").expand_idx_mapping(batch.idx_mapping, batch.num_logits, batch.cu_num_logits, 5)


@plays("gpu.sample.logit_bias:_bias_kernel")
def _(batch: Batch) -> object:
    def distinct(num: int) -> torch.Tensor:
        rows = [batch.draw.sample(range(batch.vocabulary), num) for _ in range(MAX_REQUESTS)]
        return torch.tensor(rows, dtype=torch.int32)

    logits, stops = batch.row_logits(), distinct(6)
    allowed = distinct(9)
    allowed[::2, :3] = stops[::2, :3]
    of("gpu.sample.logit_bias").apply_logit_bias(
        logits, batch.expanded, batch.positions[batch.logits_indices],
        batch.chosen((0, 0, 3, 9), torch.int32), allowed, batch.chosen((0, 0, 2, 8), torch.int32), distinct(8),
        batch.logits(MAX_REQUESTS)[:, :8].contiguous(), batch.ints(0, 40, MAX_REQUESTS),
        batch.chosen((0, 3, 6), torch.int32), stops.new_tensor(batch.draw.choices((0, 1), k=MAX_REQUESTS)), stops,
        check_all_masked_rows=batch.draw.random() < 0.7,
    )  # fmt: skip
    return logits


@plays("gpu.structured_outputs:_apply_grammar_bitmask_kernel")
def _(batch: Batch) -> object:
    stride, logits = batch.num_steps + 1, batch.row_logits()
    with_grammar = [one for one in range(batch.num_reqs) if batch.draw.random() < 0.7]
    mapping = ints([one * stride + place for one in with_grammar for place in range(stride)])
    launch(
        "gpu.structured_outputs:_apply_grammar_bitmask_kernel", (len(mapping), blocks_of(batch.vocabulary, 64)),
        logits=logits, logits_indices=mapping, cu_num_logits=batch.cu_num_logits,
        bitmask=batch.ints(-(2**31), 2**31, len(mapping), blocks_of(batch.vocabulary, 32)),
        vocab_size=batch.vocabulary, MASK_STRIDE=stride, BLOCK_SIZE=64,
    )  # fmt: skip
    return logits


@plays("gpu.sample.logprob:_topk_log_softmax_kernel", "gpu.sample.logprob:_ranks_kernel")
def _(batch: Batch) -> object:
    logits = batch.row_logits()
    logits[:, 1:3] = -torch.inf
    sampled = batch.tokens(batch.num_logits, dtype=torch.int64)
    sampled[(sampled == 1) | (sampled == 2)] = 0  # the kernel counts its padding as equally likely
    return of("gpu.sample.logprob").compute_topk_scores(logits, batch.draw.choice((0, 1, 5)), sampled)[:3]


@plays("gpu.sample.logprob:_fill_logprob_token_ids_kernel")
def _(batch: Batch) -> object:
    num_topk = batch.draw.randrange(4)
    ids = torch.zeros(batch.num_logits, 7, dtype=torch.int64)
    return launch(
        "gpu.sample.logprob:_fill_logprob_token_ids_kernel", (batch.num_logits,), out_token_ids=ids,
        out_valid_mask=torch.zeros_like(ids, dtype=torch.bool),
        sampled_token_ids=batch.tokens(batch.num_logits, dtype=torch.int64),
        topk_indices=batch.tokens(batch.num_logits, max(num_topk, 1)), expanded_idx_mapping=batch.expanded,
        num_per_req_token_ids=batch.chosen((0, 0, 2, 6), torch.int32),
        per_req_token_ids=batch.tokens(MAX_REQUESTS, 8), NUM_TOPK=num_topk, PADDED_COLS=8,
    )  # fmt: skip


@plays("gpu.sample.prompt_logprob:_prompt_logprobs_token_ids_kernel")
def _(batch: Batch) -> object:
    return of("gpu.sample.prompt_logprob").get_prompt_logprobs_token_ids(
        batch.num_tokens, batch.query_start_loc, batch.idx_mapping, batch.num_computed, batch.all_token_ids
    )


@plays("gpu.metrics.logits:_num_nans_kernel")
def _(batch: Batch) -> object:
    logits = batch.row_logits()
    logits[:, ::3] = torch.where(logits[:, ::3] > 0, torch.nan, torch.inf)
    return of("gpu.metrics.logits").get_num_nans(logits)


@plays("gpu.sample.output:_compact_sampling_mask_kernel")
def _(batch: Batch) -> object:
    logits, num_slots = batch.row_logits(), batch.num_steps + 1
    logits[logits < 1] = -torch.inf
    logits[:, 5:7] = torch.tensor([torch.inf, torch.nan])
    got = of("gpu.sample.output").SamplingMaskTensors.from_logits(
        logits, batch.cu_num_logits, batch.sampled()[1], batch.draw.choice((4, 50)), rows_per_request=num_slots
    )
    counts = got.counts.clamp(max=got.token_ids.shape[1])
    return got.counts, got.packed_mask[counts > 0], [row[:num] for row, num in zip(got.token_ids, counts, strict=True)]


@plays("gpu.model_states.mamba_hybrid:preprocess_mamba_align_fused_kernel")
def _(batch: Batch) -> object:
    name = "gpu.model_states.mamba_hybrid:preprocess_mamba_align_fused_kernel"
    return launch(
        name, (2,), idx_mapping=batch.idx_mapping, state_idx=batch.ints(-1, 4, MAX_REQUESTS),
        num_computed_tokens=batch.num_computed, query_start_loc=batch.query_start_loc,
        num_accepted_tokens=batch.ints(0, 4, MAX_REQUESTS), src_col=batch.tokens(MAX_REQUESTS),
        src_off=batch.tokens(MAX_REQUESTS), num_reqs=batch.num_reqs, BLOCK_SIZE=4, MAMBA_BLOCK_SIZE=8,
    )  # fmt: skip


@plays("mamba_utils:precopy_mamba_align_fused_kernel", "mamba_utils:postprocess_mamba_fused_kernel")
def _(batch: Batch) -> object:
    is_dim_first, width, channels, num_columns = batch.draw.random() < 0.5, 5, 3, 6
    page = torch.randn(MAX_REQUESTS * num_columns, 64, generator=batch.generator)
    states = [page[:, : width * channels].unflatten(1, (channels, width)), page[:, 20:44]]
    tables = torch.randperm(len(page), generator=batch.generator).view(MAX_REQUESTS, num_columns).int()
    layout = {
        "block_table_ptrs": torch.tensor([tables.data_ptr()]), "block_table_stride_req": num_columns,
        "state_base_addrs": torch.tensor([state.data_ptr() for state in states]),
        "state_block_strides": torch.tensor([256, 256]), "state_elem_sizes": ints([4, 4]),
        "state_inner_sizes": torch.tensor([1 if is_dim_first else channels, 24]),
        "state_conv_widths": ints([width, 0]), "state_group_indices": ints([0, 0]),
        "state_dim_row_count": ints([channels if is_dim_first else 0, 0]),
        "state_dim_row_stride": torch.tensor([4 * width if is_dim_first else 0, 0]),
        "idx_mapping": batch.with_padding(batch.idx_mapping), "num_reqs": batch.num_reqs, "COPY_BLOCK_SIZE": 8,
        "CONV_STATE_DIM_FIRST": is_dim_first, "HAS_IDX_MAPPING": True, "TEMPORAL_TILES": 2,
    }  # fmt: skip
    grid = (batch.num_reqs, 2, 2)
    launch(
        "mamba_utils:precopy_mamba_align_fused_kernel", grid, **layout,
        mamba_state_idx=batch.ints(0, 4, MAX_REQUESTS), src_col=batch.ints(-1, 4, MAX_REQUESTS),
        token_bias=batch.ints(0, 3, MAX_REQUESTS),
    )  # fmt: skip
    accepted = batch.ints(1, 4, MAX_REQUESTS)
    written = accepted.clone()
    computed = batch.ints(8, 34, MAX_REQUESTS)
    launch(
        "mamba_utils:postprocess_mamba_fused_kernel", grid, **layout, num_accepted_tokens=accepted,
        mamba_state_idx=((computed - accepted) // 8).int(), num_scheduled_tokens=None, num_computed_tokens=computed,
        num_draft_tokens=None, num_accepted_tokens_out=written, block_size=8, PRECOMPUTED_NEW_COMPUTED=True,
    )  # fmt: skip
    return page, written


@plays("gpu.mm.rope:_prepare_rope_positions_kernel")
def _(batch: Batch) -> object:
    num_dims = batch.draw.choice((3, 4))
    return launch(
        "gpu.mm.rope:_prepare_rope_positions_kernel", (batch.num_reqs,),
        positions=batch.tokens(num_dims, batch.num_tokens + 3, dtype=torch.int64),
        prefill_positions=batch.tokens(num_dims * MAX_REQUESTS, MAX_LENGTH),
        prefill_positions_stride0=num_dims * MAX_LENGTH, prefill_positions_stride1=MAX_LENGTH,
        prefill_delta=batch.ints(-5, 5, MAX_REQUESTS), idx_mapping=batch.idx_mapping,
        query_start_loc=batch.query_start_loc, prefill_lens=batch.prefill_len,
        num_computed_tokens=batch.num_computed, BLOCK_SIZE=4, NUM_DIMS=num_dims,
    )  # fmt: skip


@plays("gpu.model_states.prompt_embeds:_apply_prompt_embeds_kernel")
def _(batch: Batch) -> object:
    hidden = batch.vocabulary
    given = [torch.randn(20, hidden, generator=batch.generator) for _ in range(MAX_REQUESTS)]
    masks = batch.ints(0, 2, MAX_REQUESTS, 20).bool()
    is_masked = batch.chosen((0, 1), torch.bool)
    embeds = torch.zeros(batch.num_tokens, hidden + 3)[:, :hidden]
    launch(
        "gpu.model_states.prompt_embeds:_apply_prompt_embeds_kernel", (batch.num_reqs, 8), inputs_embeds=embeds,
        embeds_ptrs=torch.tensor([one.data_ptr() for one in given], dtype=torch.uint64),
        mask_ptrs=torch.tensor(
            [one.data_ptr() if has else 0 for one, has in zip(masks, is_masked, strict=True)], dtype=torch.uint64
        ),
        embeds_lens=batch.chosen((0, 4, 9, 20), torch.int32), idx_mapping=batch.idx_mapping,
        query_start_loc=batch.query_start_loc, num_computed_tokens=batch.num_computed, hidden_size=hidden,
        TOKEN_BLOCK=4, BLOCK_SIZE=64,
    )  # fmt: skip
    return embeds


@plays("gpu.model_states.mamba_hybrid:_scatter_num_accepted_kernel")
def _(batch: Batch) -> object:
    return launch(
        "gpu.model_states.mamba_hybrid:_scatter_num_accepted_kernel", (batch.num_reqs,),
        idx_mapping=batch.with_padding(batch.idx_mapping), num_sampled=batch.sampled()[1],
        num_accepted=batch.tokens(MAX_REQUESTS),
    )  # fmt: skip


@plays("gpu.model_states.mamba_hybrid:_fill_num_accepted_kernel")
def _(batch: Batch) -> object:
    return launch(
        "gpu.model_states.mamba_hybrid:_fill_num_accepted_kernel", (batch.num_reqs,),
        idx_mapping=batch.with_padding(batch.idx_mapping), num_accepted=batch.tokens(MAX_REQUESTS), num_sampled=3,
    )  # fmt: skip


@plays("gpu.sample.min_p:_min_p_kernel")
def _(batch: Batch) -> object:
    logits = batch.row_logits()
    of("gpu.sample.min_p").apply_min_p(logits, batch.expanded, batch.chosen((0.0, 0.05, 0.4, 1.0)))
    return logits


@plays("gpu.sample.penalties:_penalties_kernel", "gpu.sample.penalties:_bincount_kernel")
def _(batch: Batch) -> object:
    penalties, logits = of("gpu.sample.penalties"), batch.row_logits()
    mask = batch.ints(-(2**31), 2**31, MAX_REQUESTS, blocks_of(batch.vocabulary, 32))
    counts = batch.ints(0, 3, MAX_REQUESTS, batch.vocabulary)
    new = batch.idx_mapping[: batch.num_reqs // 2]
    penalties.bincount(new, batch.all_token_ids, batch.prompt_len, batch.prefill_len, mask, counts, 32)
    penalties.apply_penalties(
        logits, batch.expanded, batch.tokens(batch.num_logits), batch.places, batch.chosen((0.6, 1.0, 1.4)),
        batch.chosen((-0.5, 0.0, 0.9)), batch.chosen((-0.5, 0.0, 0.9)), mask, counts,
    )  # fmt: skip
    return logits, mask, counts


@plays("gpu.sample.bad_words:_bad_words_kernel")
def _(batch: Batch) -> object:
    logits, ids = batch.row_logits(), batch.ints(0, 2, MAX_REQUESTS, MAX_LENGTH)
    sizes = [[batch.draw.randint(1, 4) for _ in range(5)] for _ in range(MAX_REQUESTS)]
    of("gpu.sample.bad_words").apply_bad_words(
        logits, batch.expanded, batch.ints(0, 2, MAX_REQUESTS, 20),
        torch.stack([ints([0, *itertools.accumulate(one)]) for one in sizes]),
        batch.chosen((0, 1, 5), torch.int32), ids, batch.prompt_len, batch.total_len,
        batch.ints(0, 2, batch.num_logits), batch.places, 5,
    )  # fmt: skip
    return logits


@plays("gpu.sample.trace_replay:_trace_replay_kernel")
def _(batch: Batch) -> object:
    sampled = batch.tokens(batch.num_reqs, dtype=torch.int64)
    of("gpu.sample.trace_replay").apply_trace_tokens(
        sampled, batch.with_padding(batch.idx_mapping), batch.all_token_ids, batch.chosen((0, 3, 30), torch.int32),
        batch.total_len, batch.ints(1, 24, MAX_REQUESTS),
    )  # fmt: skip
    return sampled


@plays(
    "gpu.sample.thinking_budget:_update_committed_marker_cache_kernel",
    "gpu.sample.thinking_budget:_thinking_budget_kernel",
)
def _(batch: Batch) -> object:
    ids, drafts = batch.ints(0, 3, MAX_REQUESTS, MAX_LENGTH), batch.ints(0, 3, batch.num_logits)
    starts, ends, scanned = (torch.full((MAX_REQUESTS,), num, dtype=torch.int32) for num in (-1, -1, 0))
    budgets, steps = batch.chosen((-1, 0, 2, 7), torch.int32), []
    markers = [batch.ints(0, 3, batch.draw.randint(1, 3)) for _ in range(3)]
    for _ in range(3):  # what was found stays for the next steps
        steps.append(batch.row_logits())
        of("gpu.sample.thinking_budget").apply_thinking_budget(
            steps[-1], batch.idx_mapping, batch.expanded, budgets, ids, batch.total_len, drafts, batch.places,
            starts, ends, scanned, *markers,
        )  # fmt: skip
        batch.total_len += 2
    return steps


@plays("gpu.spec_decode.rejection_sampler:_flatten_sampled_kernel")
def _(batch: Batch) -> object:
    sampled, nums = batch.sampled()
    return launch(
        "gpu.spec_decode.rejection_sampler:_flatten_sampled_kernel", (batch.num_reqs,),
        flat_sampled=torch.zeros(batch.num_logits, dtype=torch.int64), sampled=sampled, num_sampled=nums,
        cu_num_logits=batch.cu_num_logits,
    )  # fmt: skip


@plays("gpu.spec_decode.rejection_sampler:_gather_draft_sampled_kernel")
def _(batch: Batch) -> object:
    return of("gpu.spec_decode.rejection_sampler").gather_draft_sampled(
        batch.tokens(batch.num_tokens), batch.positions, batch.logits_indices, batch.expanded, batch.places,
        batch.prefill_len,
    )  # fmt: skip


@plays(
    *(
        f"gpu.spec_decode.rejection_sampler_utils:_{part}_kernel"
        for part in ("compute_local_logits_stats", "rejection", "resample", "insert_resampled")
    )
)
def _(batch: Batch) -> object:
    target, tokens = batch.row_logits(), batch.tokens(batch.num_logits)
    target[target < -4] = -torch.inf
    is_best = batch.ints(0, 2, batch.num_logits).bool()
    tokens[1:] = torch.where(is_best[1:], target.argmax(-1).int()[:-1], tokens[1:])
    tokens[batch.places > 0] = batch.with_padding(tokens)[batch.places > 0]
    rates = torch.linspace(0.9, 0.5, batch.num_steps) if batch.draw.random() < 0.2 else None
    sampled, nums = of("gpu.spec_decode.rejection_sampler_utils").rejection_sample(
        target, batch.draw.choice((None, batch.logits(MAX_REQUESTS, batch.num_steps))), tokens,
        batch.cu_num_logits, batch.positions[batch.logits_indices], batch.idx_mapping, batch.expanded,
        batch.places, batch.temperatures, batch.seeds, batch.num_steps, rates,
    )  # fmt: skip
    return [row[:num] for row, num in zip(sampled, nums, strict=True)], nums


def tensors_of(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value.clone()
    elif value is not None:
        for one in value:  # type: ignore[attr-defined] - a tuple or list
            yield from tensors_of(one)


def played(names: list[str]) -> Mapping[tuple[str, int], list[torch.Tensor]]:
    return {
        (name, seed): [*tensors_of(CASES[name](Batch(f"{name} {seed}")))]
        for name in names
        for seed in range(NUM_SEEDS)
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
    builder.create_masked_store = lambda self, at, value, mask, *rest: store(self, at, value, as_bool(mask), *rest)
    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))

    def log1p(value: Any) -> Any:
        """Take the place of a function of GPUs, which the interpreter does not have."""
        return tl.tensor(interpreter.TensorHandle(np.log1p(value.handle.data), value.handle.dtype), value.type)

    of("gpu.spec_decode.rejection_sampler_utils").tldevice = SimpleNamespace(log1p=log1p)
    of("gpu.metrics.logits").libdevice = SimpleNamespace(isnan=lambda value: value != value)  # noqa: PLR0124


def main() -> int:
    interpret()
    from vllm.triton_utils import HAS_TRITON  # noqa: PLC0415

    from nnsight_engine.vllm_backend.cpu_kernels.install import FUNCTIONS, module_of  # noqa: PLC0415
    from nnsight_engine.vllm_backend.cpu_platform import V2CpuPlatform  # noqa: PLC0415

    assert HAS_TRITON
    assert CASES.keys() == FUNCTIONS.keys(), CASES.keys() ^ FUNCTIONS.keys()
    for name in FUNCTIONS:
        module, attribute = module_of(name)
        PARAMETERS[name] = tuple(inspect.signature(getattr(module, attribute).fn).parameters)
    names = [name for name in CASES if not sys.argv[1:] or name in sys.argv[1:]]
    expected = played(names)
    V2CpuPlatform.register_triton_kernel_overrides()
    num_different = 0
    for case, values in played(names).items():
        try:
            assert len(values) == len(expected[case])
            for index, (got, wanted) in enumerate(zip(values, expected[case], strict=True)):
                torch.testing.assert_close(
                    got, wanted, rtol=1e-5, atol=1e-5, equal_nan=True, msg=lambda text, at=index: f"{at}: {text}"
                )
        except AssertionError as error:
            num_different += 1
            print(*case, error, sep="\n")  # noqa: T201 - read by the test, and by people
    return int(num_different > 0)


if __name__ == "__main__":
    sys.exit(main())
