"""Which kernels have functions for CPUs, and the inputs of steps that few models have."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import vllm
from vllm.v1.worker.gpu import input_batch
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

from nnsight_engine.vllm_backend.cpu_kernels.install import FUNCTIONS, allow_v2
from nnsight_engine.vllm_backend.cpu_kernels.launches import CpuKernel
from nnsight_engine.vllm_backend.unsupported_options import REFUSALS

Kernel = Callable[[str], Any]
WORKER = Path(vllm.__file__).parent / "v1/worker"
NEVER_ON_CPUS = {
    "mamba_utils:batch_memcpy_kernel",  # vLLM replaces it itself
    "mamba_utils:get_aligned_state_indices_multi_group_kernel",  # vLLM asserts that the tensors are CUDA's
    "gpu.model_states.recoverssm:_postprocess_recoverssm_align_kernel",  # of Kimi K3 on NVIDIA's GPUs
}

MISSING = {
    "gpu.cp_utils:": "--decode-context-parallel-size above 1 on a CPU",
    "gpu.sample.batch_shard:": "--enable-batch-sharded-sampling",
    "gpu.sample.watermark:": "--watermark-config on a CPU",
    "gpu.spec_decode.acceptance_estimator:": "--speculative-config with enable_adaptive_verification",
    "gpu.spec_decode.dflash.speculator:": "--speculative-config with dflash or dspark on a CPU",
    "gpu.spec_decode.dflash2.speculator:": "--speculative-config with dflash or dspark on a CPU",
    "gpu.spec_decode.multi_module_mtp.speculator:": "--speculative-config with several mtp modules on a CPU",
    **dict.fromkeys(
        (
            "gpu.spec_decode.rejection_sampler_utils:_compute_cumulative_log_p_kernel",
            "gpu.spec_decode.rejection_sampler_utils:_compute_local_residual_mass_kernel",
        ),
        "--speculative-config with rejection_sample_method block on a CPU",
    ),
}
"""The refused option that alone launches a kernel without a function, or all of a module, on a CPU."""


def launched() -> Iterator[str]:
    """Yield each kernel that a module launches, ``name[grid](...)``."""
    for path in [*WORKER.glob("gpu/**/*.py"), WORKER / "utils.py", WORKER / "mamba_utils.py"]:
        module = ".".join(path.relative_to(WORKER).with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Call(func=ast.Subscript(value=ast.Name(id=name))) if name.endswith("_kernel"):
                    yield f"{module}:{name}"


def test_all_launched_kernels_have_a_function_or_a_refused_option() -> None:
    names = set(launched()) - NEVER_ON_CPUS
    missing = {name for name in names if name.startswith(tuple(MISSING))}
    assert names == FUNCTIONS.keys() | missing
    assert not FUNCTIONS.keys() & missing
    assert all(any(name.startswith(start) for name in missing) for start in MISSING)
    assert set(MISSING.values()) <= {one.option for one in REFUSALS}


def _scale_kernel(values_ptr: Any, factor: int, BLOCK_SIZE: int) -> None:  # noqa: N803 - as in Triton
    raise AssertionError


def test_functions_replace_kernels_of_a_triton_with_a_backend_for_cpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def scale(*, values: torch.Tensor, factor: int) -> None:
        values *= factor

    values = torch.ones(3)
    CpuKernel("scale", triton.jit(_scale_kernel), scale)[1,](values, factor=2, BLOCK_SIZE=8, num_warps=4)
    assert values.tolist() == [2, 2, 2]
    monkeypatch.setattr("vllm.triton_utils.triton", triton)
    monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", False)
    before = triton.next_power_of_2
    allow_v2()
    assert triton.next_power_of_2 is before


def test_options_without_a_function_are_refused() -> None:
    zeros = torch.zeros(1)
    with pytest.raises(
        NotImplementedError, match="_gumbel_sample_kernel has no function for CPUs with use_fp64 True"
    ):
        gumbel_sample(
            torch.zeros(1, 4),
            zeros.int(),
            zeros,
            zeros.long(),
            zeros.long(),
            apply_temperature=True,
            is_drafting=False,
            use_fp64=True,
        )


MAX_REQUESTS, MAX_LENGTH = 6, 40
REQUESTS = torch.tensor([4, 0, 2], dtype=torch.int32)
"""The state of each request of the batch: one at its prompt's start, one at its end, one that generates."""
STARTS = torch.tensor([0, 5, 8, 11], dtype=torch.int32)
PREFILL = torch.tensor([9, 0, 4, 0, 12, 0], dtype=torch.int32)
COMPUTED = torch.tensor([6, 0, 7, 0, 0, 0], dtype=torch.int32)


def test_the_end_of_a_prompt_keeps_its_tokens() -> None:
    # One draft, and the row before it is still the prompt's.
    ids = torch.arange(100, 103, dtype=torch.int32)
    arguments = [torch.tensor([0, 3], dtype=torch.int32), torch.tensor([5]), torch.tensor([4, 0, 0])]
    input_batch.combine_sampled_and_draft_tokens(
        ids,
        torch.tensor([0], dtype=torch.int32),
        torch.tensor([50, 0, 0]),
        *arguments,
        torch.tensor([[7, 8]]),
        torch.tensor([0, 2], dtype=torch.int32),
        2,
    )
    assert ids.tolist() == [100, 101, 7]


def test_writes_reach_their_rows_and_tables(kernel: Kernel) -> None:
    writes = [
        torch.tensor([2, 0, 2], dtype=torch.int32),
        torch.tensor([1, 0, 3], dtype=torch.int32),
        torch.arange(1, 8, dtype=torch.int32),
        torch.tensor([3, 4, 7], dtype=torch.int32),
    ]
    table = torch.zeros(3, 8, dtype=torch.int32)
    kernel("gpu.buffer_utils:_apply_write_kernel")[3,](
        table, 8, *writes, None, BLOCK_SIZE=4, MULTI_GROUP=False
    )
    assert table.tolist() == [[4, *[0] * 7], [0] * 8, [0, 1, 2, 5, 6, 7, 0, 0]]  # the last write last
    row = torch.zeros(6, dtype=torch.int32)
    one = [torch.tensor([4]), torch.tensor([0]), torch.tensor([9]), torch.tensor([1])]
    kernel("gpu.buffer_utils:_apply_write_kernel")[1,](row, 1, *one, None, BLOCK_SIZE=4, MULTI_GROUP=False)
    assert row.tolist() == [0, 0, 0, 0, 9, 0]
    tables = [torch.zeros(3, 8, dtype=torch.int32) for _ in range(2)]
    kernel("gpu.buffer_utils:_apply_write_kernel")[3,](
        tables, None, *writes, torch.tensor([1, 0, 1]), BLOCK_SIZE=4, MULTI_GROUP=True
    )
    assert [one.sum().item() for one in tables] == [4, 21]


def test_blocks_are_zeroed_in_each_segment(kernel: Kernel) -> None:
    caches = [torch.ones(4, 6, dtype=torch.float32), torch.ones(4, 10, dtype=torch.bfloat16)]
    kernel("utils:_zero_kv_blocks_kernel")[2, 2, 1](
        torch.tensor([one.data_ptr() for one in caches], dtype=torch.uint64),
        torch.tensor([6, 5]),
        torch.tensor([4, 5]),
        torch.tensor([3, 1]),
        BLOCK_SIZE=8,
    )
    assert caches[0].tolist() == [[1] * 6, [0] * 4 + [1] * 2] * 2
    assert caches[1].tolist() == [[1] * 10, [0] * 10] * 2


def test_positions_of_several_dimensions(kernel: Kernel) -> None:
    given = torch.arange(2 * MAX_REQUESTS * MAX_LENGTH, dtype=torch.int32).view(-1, MAX_LENGTH)
    positions = torch.zeros(2, 12, dtype=torch.int64)
    delta = torch.tensor([0, 0, -3, 0, 0, 0], dtype=torch.int32)
    kernel("gpu.mm.rope:_prepare_rope_positions_kernel")[3,](
        positions,
        12,
        given,
        2 * MAX_LENGTH,
        MAX_LENGTH,
        delta,
        REQUESTS,
        STARTS,
        PREFILL,
        COMPUTED,
        BLOCK_SIZE=4,
        NUM_DIMS=2,
    )
    assert positions[0].tolist() == [*range(320, 325), 6, 7, 8, 4, 5, 6, 0]
    assert positions[1].tolist() == [*range(360, 365), 46, 47, 48, 4, 5, 6, 0]


def test_given_embeddings_replace_those_of_tokens(kernel: Kernel) -> None:
    hidden, embeds = 4, torch.zeros(11, 4)
    given = torch.arange(1.0, 1 + 7 * hidden).view(7, hidden)
    is_token = torch.tensor([False, True, False, False, False, False, False])
    addresses, masks = (torch.zeros(MAX_REQUESTS, dtype=torch.uint64) for _ in range(2))
    addresses[4] = addresses[0] = given.data_ptr()
    masks[4] = is_token.data_ptr()
    lengths = torch.tensor([7, 0, 0, 0, 7, 0], dtype=torch.int32)
    kernel("gpu.model_states.prompt_embeds:_apply_prompt_embeds_kernel")[3, 2](
        embeds,
        hidden,
        addresses,
        masks,
        lengths,
        REQUESTS,
        STARTS,
        COMPUTED,
        hidden,
        TOKEN_BLOCK=4,
        BLOCK_SIZE=4,
    )
    expected = torch.zeros(11, hidden)
    expected[[0, 2, 3, 4]] = given[[0, 2, 3, 4]]
    expected[5] = given[6]  # the second request has six tokens behind it
    assert torch.equal(embeds, expected)


def test_accepted_tokens_are_kept_by_request(kernel: Kernel) -> None:
    accepted = torch.full((5,), 9, dtype=torch.int32)
    requests = torch.tensor([3, -1, 0], dtype=torch.int32)
    kernel("gpu.model_states.mamba_hybrid:_scatter_num_accepted_kernel")[3,](
        requests, torch.tensor([2, 4, 0], dtype=torch.int32), accepted
    )
    assert accepted.tolist() == [1, 9, 9, 2, 9]
    kernel("gpu.model_states.mamba_hybrid:_fill_num_accepted_kernel")[3,](requests, accepted, 5)
    assert accepted.tolist() == [5, 9, 9, 5, 9]
