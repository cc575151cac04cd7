"""CUDA graphs beside taps: the model is cut at them, and no step with an intervention is one full graph.

There is no GPU here. vLLM's own configuration, dispatcher and runner choose as they do on one, and
``cuda_graphs_check`` runs an engine whose model vLLM compiles and cuts as on one.
"""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import EngineArgs
from vllm.config import CompilationConfig, CompilationMode, VllmConfig
from vllm.platforms import current_platform
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.worker.gpu import cudagraph_utils
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from nnsight_engine.vllm_backend.steps.graphs import TAP_OPS, StepGraphs, cut_at_taps
from nnsight_engine.vllm_backend.steps.runner_v1 import V1RunnerMixin
from tests.e2e.check_process import report_of
from tests.e2e.cuda_graphs_check import NUM_TOKENS
from tests.e2e.engine_kinds import V1_SYNC, V2_SYNC, EngineKind, environment
from tests.families.checkpoints import NUM_LAYERS, write_checkpoint

pytestmark = [pytest.mark.e2e, pytest.mark.heavy]

FULL, PIECEWISE, NONE = "FULL", "PIECEWISE", "NONE"
ATTENTION = "vllm::unified_attention_with_output"


def on_gpu(mode: str = "FULL_AND_PIECEWISE", **options: Any) -> CompilationConfig:
    """Return what an engine on a GPU has once vLLM has filled in its defaults."""
    config = CompilationConfig(
        mode=CompilationMode.VLLM_COMPILE,
        cudagraph_mode=mode,
        cudagraph_capture_sizes=[1, 2, 4, 8],
        max_cudagraph_capture_size=8,
        **options,
    )
    config.set_splitting_ops_for_v1(all2all_backend="naive")
    return config


# Where the model is cut.


def test_the_model_is_cut_at_taps_and_at_attention() -> None:
    config = on_gpu()
    before = list(config.splitting_ops or [])
    assert cut_at_taps(config)
    assert config.splitting_ops == [*before, *TAP_OPS]
    assert ATTENTION in before
    assert config.is_attention_compiled_piecewise()


def test_a_second_call_adds_nothing() -> None:
    config = on_gpu()
    cut_at_taps(config)
    once = config.splitting_ops
    assert cut_at_taps(config)
    assert config.splitting_ops == once


def test_a_list_that_engines_share_is_left_alone() -> None:
    config, other = on_gpu(), on_gpu()
    other.splitting_ops = config.splitting_ops
    cut_at_taps(config)
    assert not set(TAP_OPS) & set(other.splitting_ops or [])


def test_graphs_that_inductor_cuts_are_cut_at_taps() -> None:
    config = on_gpu(use_inductor_graph_partition=True, backend="inductor")
    assert cut_at_taps(config)
    assert {ATTENTION, *TAP_OPS} <= set(config.splitting_ops or [])


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(on_gpu(mode), id=mode) for mode in ("FULL", "FULL_DECODE_ONLY", "NONE")
    ] + [pytest.param(on_gpu(splitting_ops=[]), id="nothing is to be cut")],
)  # fmt: skip
def test_nothing_is_cut_where_no_pieces_become_graphs(config: CompilationConfig) -> None:
    before = list(config.splitting_ops or [])
    assert not cut_at_taps(config)
    assert config.splitting_ops == before


def test_a_cut_model_has_another_key_in_the_compile_cache() -> None:
    config = on_gpu()
    before = config.compute_hash()
    cut_at_taps(config)
    assert config.compute_hash() != before


# Which graph a step gets.


@pytest.fixture(scope="module")
def engine_config(tmp_path_factory: pytest.TempPathFactory) -> VllmConfig:
    """Return the whole configuration of an engine on this machine."""
    checkpoint = write_checkpoint("llama", tmp_path_factory.mktemp("llama"))
    return EngineArgs(model=str(checkpoint), max_num_seqs=8, max_model_len=128).create_engine_config()


def test_on_a_cpu_nothing_is_cut(engine_config: VllmConfig) -> None:
    config = copy.copy(engine_config.compilation_config)
    assert not cut_at_taps(config)
    assert not set(TAP_OPS) & set(config.splitting_ops or [])


class ChoosingRunner(V1RunnerMixin, GPUModelRunner):
    """As much of vLLM's runner, with interventions, as chooses a step's graph."""

    def __init__(self, config: VllmConfig, *, has_taps: bool, decode_query_len: int) -> None:
        """Fill the dispatcher, as vLLM does once it knows the attention."""
        self.vllm_config = config
        self.model_config = config.model_config
        self.uniform_decode_query_len = decode_query_len
        self.handler: Any = SimpleNamespace()
        self.graphs = self.handler.graphs = StepGraphs(
            is_cut=has_taps and cut_at_taps(config.compilation_config)
        )
        self.cudagraph_dispatcher = CudagraphDispatcher(config)
        self.cudagraph_dispatcher.initialize_cudagraph_keys(
            config.compilation_config.cudagraph_mode, decode_query_len
        )

    def choice(self, tokens: dict[str, int], **options: Any) -> tuple[str, int]:
        """Return the mode and the number of rows of a step with so many tokens for each request."""
        numbers = np.array(list(tokens.values()), dtype=np.int32)
        mode, batch, *_ = self._determine_batch_execution_and_padding(
            num_tokens=int(numbers.sum()),
            num_reqs=len(numbers),
            num_scheduled_tokens_np=numbers,
            max_num_scheduled_tokens=int(numbers.max()),
            force_has_lora=False,
            force_num_active_loras=0,
            **options,
        )
        return mode.name, batch.num_tokens


def runner_with(
    engine_config: VllmConfig, mode: str, *, has_taps: bool = True, decode_query_len: int = 1
) -> ChoosingRunner:
    """Return the runner of an engine with graphs of this mode."""
    config = copy.copy(engine_config)
    config.compilation_config = on_gpu(mode)
    return ChoosingRunner(config, has_taps=has_taps, decode_query_len=decode_query_len)


DECODING = {"a": 1, "b": 1, "c": 1}
DRAFTED = {"a": 4, "b": 4}
"""Decodes with three drafts each."""
UNDRAFTED = {"a": 4, "b": 1}
"""One request without drafts beside one with them."""
PROMPTS = {"a": 1, "b": 1, "c": 5}
LONG = {"a": 1, "b": 1, "c": 40}


@pytest.fixture
def runner(engine_config: VllmConfig) -> ChoosingRunner:
    """Return the runner of an engine with vLLM's default graphs."""
    return runner_with(engine_config, "FULL_AND_PIECEWISE")


def test_steps_without_interventions_get_what_vllm_gives(runner: ChoosingRunner) -> None:
    runner.graphs.begin([], set(), DECODING)
    assert runner.choice(DECODING) == (FULL, 4)
    assert runner.choice(PROMPTS) == (PIECEWISE, 8)
    assert runner.choice(LONG) == (NONE, 42)


def test_a_step_with_interventions_gets_pieces_or_nothing(runner: ChoosingRunner) -> None:
    runner.graphs.begin(["b"], set(), DECODING)
    assert runner.choice(DECODING) == (PIECEWISE, 4)
    assert runner.choice(PROMPTS) == (PIECEWISE, 8)
    assert runner.choice(LONG) == (NONE, 42)


def test_full_graphs_are_back_without_the_request(runner: ChoosingRunner) -> None:
    runner.graphs.begin(["b"], set(), DECODING)
    runner.graphs.end()
    runner.graphs.begin([], set(), DECODING)
    assert runner.choice(DECODING)[0] == PIECEWISE
    runner.graphs.end()
    others = {"a": 1, "c": 1}  # it waits
    runner.graphs.begin([], set(), others)
    assert runner.choice(others) == (FULL, 2)
    runner.graphs.end()
    runner.graphs.begin([], {"b"}, DECODING)  # one of the same name
    assert runner.choice(DECODING)[0] == FULL


def test_captures_between_steps_get_the_graph_that_they_capture(runner: ChoosingRunner) -> None:
    runner.graphs.begin(["b"], set(), DECODING)
    runner.graphs.end()
    sizes = dict.fromkeys("abcd", 1)
    assert runner.choice(sizes, force_uniform_decode=True) == (FULL, 4)
    assert runner.choice(sizes, force_uniform_decode=False) == (PIECEWISE, 4)
    assert runner.choice(sizes, force_eager=True) == (NONE, 4)


with_and_without_drafts = pytest.mark.parametrize(
    ("decoding", "num_padded"),
    [pytest.param(DECODING, 4, id="no drafts"), pytest.param(DRAFTED, 8, id="three drafts")],
)
"""Decodes of one length, and the size of the graph that holds them."""

every_mode = pytest.mark.parametrize(
    ("mode", "idle", "intervening"),
    [
        ("FULL_AND_PIECEWISE", FULL, PIECEWISE),
        ("PIECEWISE", PIECEWISE, PIECEWISE),
        ("FULL", FULL, NONE),
        ("FULL_DECODE_ONLY", FULL, NONE),
        ("NONE", NONE, NONE),
    ],
)
"""Modes of graphs, and the kind of a decode step where nothing intervenes and where something does."""


@with_and_without_drafts
@every_mode
def test_every_mode_of_graphs(
    engine_config: VllmConfig,
    mode: str,
    idle: str,
    intervening: str,
    decoding: dict[str, int],
    num_padded: int,
) -> None:
    runner = runner_with(engine_config, mode, decode_query_len=max(decoding.values()))
    assert runner.choice(decoding)[0] == idle
    runner.graphs.begin(["b"], set(), decoding)
    num_rows = sum(decoding.values()) if intervening == NONE else num_padded
    assert runner.choice(decoding) == (intervening, num_rows)
    runner.graphs.end()
    assert runner.choice(decoding)[0] == idle


def test_a_request_without_drafts_among_drafted_ones_needs_pieces(engine_config: VllmConfig) -> None:
    runner = runner_with(engine_config, "FULL_AND_PIECEWISE", decode_query_len=4)
    runner.graphs.begin([], set(), UNDRAFTED)
    assert runner.choice(UNDRAFTED) == (PIECEWISE, 8)


def test_pieces_that_do_not_end_at_taps_are_not_replayed(engine_config: VllmConfig) -> None:
    runner = runner_with(engine_config, "FULL_AND_PIECEWISE", has_taps=False)
    assert not set(TAP_OPS) & set(runner.vllm_config.compilation_config.splitting_ops or [])
    runner.graphs.begin(["b"], set(), DECODING)
    assert runner.choice(DECODING) == (NONE, 3)


# The same on the V2 runner.


class Manager(CudaGraphManager):
    """vLLM's manager of the V2 runner's graphs, as if it had captured them.

    Args:
        config: The engine's configuration.
        decode_query_len: Rows of a request that decodes: one, and one for each draft.
        varlen_decode: Whether full graphs serve decodes of different lengths.
    """

    def __init__(self, config: VllmConfig, *, decode_query_len: int = 1, varlen_decode: bool = False) -> None:
        mode = config.compilation_config.cudagraph_mode
        super().__init__(config, torch.device("cpu"), mode, decode_query_len, varlen_decode=varlen_decode)
        self._graphs_captured = True

    def choice(self, graphs: StepGraphs, tokens: dict[str, int]) -> tuple[str, int]:
        """Return the mode and the number of rows of a step, asked for as the V2 runner does."""
        numbers = list(tokens.values())
        is_decode = max(numbers) <= self.decode_query_len
        with graphs.constraining(self):
            chosen = self.dispatch(
                len(numbers),
                sum(numbers),
                numbers[0] if is_decode and len(set(numbers)) == 1 else None,
                num_active_loras=0,
                max_query_len=max(numbers) if is_decode else None,
            )
        return chosen.cg_mode.name, chosen.num_tokens


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be the only pipeline stage, without processes."""
    monkeypatch.setattr(
        cudagraph_utils, "get_pp_group", lambda: SimpleNamespace(is_first_rank=True, is_last_rank=True)
    )
    monkeypatch.setattr(type(current_platform), "get_global_graph_pool", lambda _self: None)


def manager_with(
    engine_config: VllmConfig, mode: str, *, has_taps: bool = True, **options: Any
) -> tuple[Manager, StepGraphs]:
    config = copy.copy(engine_config)
    config.compilation_config = on_gpu(mode)
    graphs = StepGraphs(is_cut=has_taps and cut_at_taps(config.compilation_config))
    return Manager(config, **options), graphs


@pytest.mark.usefixtures("stage")
@with_and_without_drafts
@pytest.mark.parametrize("varlen_decode", [False, True])
@every_mode
def test_every_mode_of_graphs_on_the_v2_runner(
    engine_config: VllmConfig,
    mode: str,
    idle: str,
    intervening: str,
    decoding: dict[str, int],
    num_padded: int,
    *,
    varlen_decode: bool,
) -> None:
    decode_query_len = max(decoding.values())
    manager, graphs = manager_with(
        engine_config, mode, varlen_decode=varlen_decode, decode_query_len=decode_query_len
    )
    assert manager.choice(graphs, decoding)[0] == idle
    graphs.begin(["b"], set(), decoding)
    chosen, num_rows = manager.choice(graphs, decoding)
    assert chosen == intervening
    assert num_rows == (sum(decoding.values()) if chosen == NONE else num_padded)
    graphs.end()
    assert manager.choice(graphs, decoding)[0] == idle


@pytest.mark.usefixtures("stage")
@pytest.mark.parametrize(("varlen_decode", "idle"), [(False, PIECEWISE), (True, FULL)])
def test_a_request_without_drafts_among_drafted_ones_on_the_v2_runner(
    engine_config: VllmConfig, idle: str, *, varlen_decode: bool
) -> None:
    manager, graphs = manager_with(
        engine_config, "FULL_AND_PIECEWISE", varlen_decode=varlen_decode, decode_query_len=4
    )
    assert manager.choice(graphs, UNDRAFTED) == (idle, 8)
    graphs.begin(["b"], set(), UNDRAFTED)
    assert manager.choice(graphs, UNDRAFTED) == (PIECEWISE, 8)


@pytest.mark.usefixtures("stage")
def test_pieces_that_do_not_end_at_taps_are_not_replayed_on_the_v2_runner(engine_config: VllmConfig) -> None:
    manager, graphs = manager_with(engine_config, "FULL_AND_PIECEWISE", has_taps=False)
    graphs.begin(["b"], set(), DECODING)
    assert manager.choice(graphs, DECODING) == (NONE, 3)
    assert manager.choice(graphs, PROMPTS) == (NONE, 7)


@pytest.mark.usefixtures("stage")
def test_breakable_graphs_are_not_replayed(
    engine_config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager, graphs = manager_with(engine_config, "FULL_AND_PIECEWISE")
    monkeypatch.setattr(manager, "use_breakable_cg", True)
    assert manager.choice(graphs, PROMPTS)[0] == PIECEWISE
    graphs.begin(["b"], set(), PROMPTS)
    assert manager.choice(graphs, PROMPTS) == (NONE, 7)


# An engine whose model is cut.


def report_on(kind: EngineKind, folder: Path) -> Any:
    """Run one engine of a kind that is cut, and one without drafts that is not."""
    checks = "tests.e2e.cuda_graphs_check"
    return report_of(checks, folder, [str(kind)], environment=environment(kind))[str(kind)]


@pytest.fixture(scope="module", params=[V1_SYNC, V2_SYNC], ids=str)
def report(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Run engines of each runner."""
    return report_on(request.param, tmp_path_factory.mktemp("graphs"))


def test_there_is_a_piece_between_each_tap_and_attention(report: Any) -> None:
    assert set(TAP_OPS) <= set(report["splitting_ops"])
    assert len(report["splitting_ops"]) == len(set(report["splitting_ops"]))
    assert (
        report["num_pieces"] == 2 * NUM_LAYERS + 2
    )  # without taps there is one for each layer, and one more
    assert report["num_with_cuts"] == report["num_pieces"] + 2 * NUM_LAYERS + 1
    assert report["num_replayed"]


REQUESTS = ("plain", "steered", "captured", "inside", "at_taps", "going_on_inside", "together")


@pytest.mark.parametrize("name", REQUESTS)
def test_it_answers_what_an_engine_without_pieces_answers(report: Any, name: str) -> None:
    own, expected = report["cut"][name], report["eager"][name]
    assert own["tokens"] == expected["tokens"]
    assert own.get("off", 0.0) < 1e-5


def test_interventions_change_its_answers(report: Any) -> None:
    tokens = [report["cut"][name]["tokens"] for name in ("plain", "steered", "at_taps", "going_on_inside")]
    assert len(set(map(tuple, tokens))) == len(tokens)


def test_its_steps_with_interventions_are_replayed_from_pieces(report: Any) -> None:
    steps = {name: report["cut"][name]["steps"] for name in REQUESTS}
    assert steps["plain"] == [[PIECEWISE, 8], [FULL, 1], [FULL, 1], [FULL, 1]]
    for name in REQUESTS[1:-1]:
        assert steps[name] == [[PIECEWISE, 8], [PIECEWISE, 1], [PIECEWISE, 1], [PIECEWISE, 1]]
    assert steps["together"] == [[NONE, 15], [PIECEWISE, 4], [PIECEWISE, 4], [PIECEWISE, 4]]


def test_its_interventions_run_where_they_run_without_pieces(report: Any) -> None:
    tiers = {name: report["cut"][name]["tiers"] for name in REQUESTS}
    assert tiers["plain"] == {"plain": 4}
    for name in ("steered", "captured", "at_taps", "together"):
        assert tiers[name] == {"tap": 4}
    for name in ("inside", "going_on_inside"):
        assert tiers[name] == {"eager": 4}


# The same with drafts.


@pytest.fixture(scope="module", params=["v1-sync-self_draft", "v2-sync-self_draft"])
def drafted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Run engines of each runner, where the model is its own draft."""
    return report_on(EngineKind.named(request.param), tmp_path_factory.mktemp("drafted"))


def test_it_answers_with_drafts_what_an_engine_without_pieces_answers_without(drafted: Any) -> None:
    for name in REQUESTS:
        own, expected = drafted["cut"][name], drafted["eager"][name]
        assert own["tokens"] == expected["tokens"], name
        assert own.get("off", 0.0) < 1e-5, name


def test_its_drafted_decode_is_a_full_graph_where_nothing_intervenes(drafted: Any) -> None:
    steps = {name: drafted["cut"][name]["steps"] for name in REQUESTS}
    assert steps["plain"] == [[PIECEWISE, 8], [FULL, 4]]
    for name in REQUESTS[1:-1]:
        assert {mode for mode, _ in steps[name]} == {PIECEWISE}, name
    for name in ("at_taps", "going_on_inside"):  # traces take no drafts
        assert len(steps[name]) == NUM_TOKENS
