"""Requests whose blocks a step did not wait for: their tokens are computed again, with the same samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import LogprobsTensors, ModelRunnerOutput, SamplerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from nnsight_engine.modeling.bundled import bundled_model_path
from nnsight_engine.plans.records import StepResults
from nnsight_engine.vllm_backend.compat import EngineLimits, attach_results, engine_options, is_single_tenant
from nnsight_engine.vllm_backend.fair_scheduler import SENDER_KEY
from nnsight_engine.vllm_backend.scheduler import InterventionScheduler
from nnsight_engine.vllm_backend.steps.tokens import ReplayedSamples
from nnsight_engine.vllm_backend.traces.context import TRACE_KEY, TraceEntry

_BLOCK = 16
_NUM_BLOCKS = 64


class Scheduling:
    """A scheduler without an engine: each step gives every request whose tokens are complete a token."""

    def __init__(self, config: Any) -> None:
        spec = FullAttentionSpec(block_size=_BLOCK, num_kv_heads=3, head_size=64, dtype=torch.bfloat16)
        cache = KVCacheConfig(_NUM_BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)])
        self.scheduler = InterventionScheduler(
            vllm_config=config,
            kv_cache_config=cache,
            structured_output_manager=StructuredOutputManager(config),
            block_size=_BLOCK,
        )
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(_BLOCK, sha256)
        self.given: dict[str, int] = {}
        self.alone: list[bool] = []

    def add(self, name: str, length: int, sender: str, *, is_sandboxed: bool = False) -> None:
        extra: dict[str, Any] = {SENDER_KEY: sender}
        if is_sandboxed:
            extra[TRACE_KEY] = TraceEntry(name, 0, 1, b"", [{}], sandbox_of=sender).to_plain()
        params = SamplingParams(max_tokens=4, temperature=0.0, extra_args=extra)
        params.skip_reading_prefix_cache = True
        request = Request(name, list(range(1, length + 1)), params, None, block_hasher=self.hasher)
        self.scheduler.add_request(request)

    def step(
        self,
        *,
        undone: tuple[str, ...] = (),
        waiting: frozenset[str] | None = None,
        throttled: frozenset[str] | None = None,
    ) -> dict[str, int]:
        """Run a step; returns how many tokens each request had in it."""
        scheduled = self.scheduler.schedule()
        self.alone.append(is_single_tenant(scheduled))
        names = list(scheduled.num_scheduled_tokens)
        requests = self.scheduler.requests
        sampled = [
            [7]
            if name not in undone and requests[name].num_computed_tokens == requests[name].num_tokens
            else []
            for name in names
        ]
        output: Any = ModelRunnerOutput(
            names, {name: row for row, name in enumerate(names)}, sampled_token_ids=sampled
        )
        results = StepResults({}, {}, {}, undone=list(undone), waiting=waiting, throttled=throttled)
        told = self.scheduler.update_from_output(scheduled, attach_results(output, results))
        for client in told.values():
            for one in client.outputs:
                self.given[one.request_id] = self.given.get(one.request_id, 0) + len(one.new_token_ids)
        return dict(scheduled.num_scheduled_tokens)


@pytest.fixture(scope="module")
def config() -> Any:
    model = str(bundled_model_path())
    args = EngineArgs(model, max_model_len=256, enforce_eager=True, **engine_options(EngineLimits()))
    config = args.create_engine_config()
    config.cache_config.num_gpu_blocks = _NUM_BLOCKS
    return config


@pytest.fixture
def scheduling(config: Any) -> Scheduling:
    return Scheduling(config)


def test_a_prompt_is_computed_again_whole_and_others_go_on_meanwhile(scheduling: Scheduling) -> None:
    scheduling.add("slow", 40, "many")
    assert scheduling.step(undone=("slow",), waiting=frozenset({"slow"})) == {"slow": 40}
    scheduling.add("other", 20, "few")
    assert scheduling.step() == {"other": 20}
    assert scheduling.step(waiting=frozenset()) == {"other": 1}
    assert scheduling.step() == {"other": 1, "slow": 40}
    assert scheduling.given == {"other": 3, "slow": 1}
    assert scheduling.alone == [True, False, False, False]


def test_a_token_is_computed_again_and_counts_once(scheduling: Scheduling) -> None:
    scheduling.add("slow", 40, "many")
    scheduling.step()
    blocks = scheduling.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    for _ in range(3):
        assert scheduling.step(undone=("slow",), waiting=frozenset({"slow"})) == {"slow": 1}
        assert scheduling.step() == {}, "it waits, and there is nobody else"
        assert scheduling.step(waiting=frozenset()) == {}
    assert scheduling.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == blocks
    while scheduling.scheduler.has_unfinished_requests():
        assert scheduling.step() == {"slow": 1}
    assert scheduling.given == {"slow": 4}
    assert scheduling.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() > blocks


def test_a_waiting_request_keeps_its_slot(scheduling: Scheduling) -> None:
    scheduling.scheduler.max_num_running_reqs = scheduling.scheduler.max_num_active_reqs = 2
    scheduling.add("slow", 10, "many")
    scheduling.step()
    scheduling.step(undone=("slow",), waiting=frozenset({"slow"}))
    for number in range(3):
        scheduling.add(f"many-{number}", 10, "many")
    assert set(scheduling.step()) == {"many-0"}
    assert scheduling.scheduler.max_num_running_reqs == 2
    assert {"slow", "many-0"} == {one.request_id for one in scheduling.scheduler.running}


def test_code_of_a_tenant_that_rests_is_in_no_step_and_all_else_is(scheduling: Scheduling) -> None:
    scheduling.add("traced", 10, "many", is_sandboxed=True)
    scheduling.add("plain", 10, "many")
    scheduling.add("other", 10, "few", is_sandboxed=True)
    scheduling.step(throttled=frozenset({"many"}))
    scheduling.add("new", 10, "many", is_sandboxed=True)
    scheduling.add("late", 10, "few", is_sandboxed=True)
    met: set[str] = set()
    for _ in range(3):
        met.update(scheduling.step())
    assert met == {"plain", "other", "late"}
    scheduling.step(throttled=frozenset())
    for _ in range(20):
        met.update(scheduling.step())
    assert met == {"plain", "other", "late", "traced", "new"}
    assert set(scheduling.given.values()) == {4}


def test_a_request_that_ends_while_waiting_is_dropped(scheduling: Scheduling) -> None:
    scheduling.add("slow", 10, "many")
    scheduling.step(undone=("slow",), waiting=frozenset({"slow"}))
    scheduling.scheduler.finish_requests("slow", RequestStatus.FINISHED_ABORTED)
    assert scheduling.step(waiting=frozenset()) == {}
    assert not scheduling.scheduler.has_unfinished_requests()


def _sampled(rows: list[list[int]], scale: float = 1.0) -> SamplerOutput:
    """Return tokens with a row for each request, and logprobs with one for each token."""
    tokens = torch.tensor(rows, dtype=torch.int32)
    flat = tokens[tokens >= 0]
    ranks = flat.clone()
    logprobs = LogprobsTensors(flat[:, None].repeat(1, 3), flat[:, None].repeat(1, 3) * scale, ranks)
    return SamplerOutput(tokens, logprobs)


def test_a_sample_comes_back_once_in_any_row_beside_drafts_unless_its_request_ended() -> None:
    kept, first = ReplayedSamples(), _sampled([[11], [12], [13]])
    for name, row in (("own", 1), ("gone", 2)):
        kept.keep(name, row, first.sampled_token_ids, first, row)
    kept.forget({"gone"})
    again = _sampled([[21, 22], [23, -1], [24, -1]], scale=9.0)
    rows = {"own": 2, "other": 0, "gone": 1}
    kept.put_back(again, rows, (0, 2, 3), {"own"})
    assert again.sampled_token_ids.tolist() == [[21, 22], [23, -1], [24, -1]], "it is left out once more"
    kept.put_back(again, rows, (0, 2, 3), ())
    assert again.sampled_token_ids.tolist() == [[21, 22], [23, -1], [12, -1]]
    ids, logprobs, ranks = again.logprobs_tensors[:3]
    assert logprobs[:, 0].tolist() == [189, 198, 207, 12]
    assert ids[3].tolist() == [12, 12, 12]
    assert ranks.tolist() == [21, 22, 23, 12]
    later = _sampled([[31]])
    kept.put_back(later, {"own": 0}, range(1), ())
    assert later.sampled_token_ids.item() == 31
