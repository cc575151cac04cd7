"""CUDA graphs beside taps: the model is cut at them, and what they do is in some full graphs.

There is no GPU here. vLLM's own configuration, dispatcher and runner choose as they do on one, and
``cuda_graphs_check`` runs an engine whose model vLLM compiles and cuts as on one.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import EngineArgs
from vllm.config import CompilationConfig, CompilationMode, VllmConfig
from vllm.platforms import current_platform
from vllm.v1.worker.gpu import cudagraph_utils
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

from nnsight_engine.vllm_backend.steps.graphs import TAP_OPS, StepGraphs, cut_at_taps
from tests.e2e.check_process import report_of
from tests.e2e.cuda_graphs_check import NUM_TOKENS
from tests.e2e.engine_kinds import DEFAULT, EngineKind, environment
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
    config, other = on_gpu(), on_gpu()
    before = other.splitting_ops = list(config.splitting_ops or [])
    config.splitting_ops = before  # a list that engines share is left alone
    for _ in range(2):  # a second call adds nothing
        assert cut_at_taps(config)
        assert config.splitting_ops == [*before, *TAP_OPS]
    assert not set(TAP_OPS) & set(other.splitting_ops)
    assert ATTENTION in before
    assert config.is_attention_compiled_piecewise()


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


class Manager(CudaGraphManager):
    """vLLM's manager of graphs, as if it had captured them."""

    varlen_decode = False

    def __init__(self, config: VllmConfig, graphs: StepGraphs, decode_query_len: int) -> None:
        mode, varlen = config.compilation_config.cudagraph_mode, self.varlen_decode
        super().__init__(config, torch.device("cpu"), mode, decode_query_len, varlen_decode=varlen)
        self._graphs_captured = True
        self.graphs = graphs

    def choice(self, tokens: dict[str, int]) -> tuple[str, int]:
        """Return the mode and the number of rows of a step with so many tokens for each request."""
        numbers = list(tokens.values())
        is_decode = max(numbers) <= self.decode_query_len
        with self.graphs.constraining(self, lambda _table, run: run()):
            chosen = self.dispatch(
                len(numbers),
                sum(numbers),
                numbers[0] if is_decode and len(set(numbers)) == 1 else None,
                num_active_loras=0,
                max_query_len=max(numbers) if is_decode else None,
            )
        return chosen.cg_mode.name, chosen.num_tokens


class VarlenManager(Manager):
    """Has full graphs for decodes of different lengths."""

    varlen_decode = True


DECODING = {"a": 1, "b": 1, "c": 1}
DRAFTED = {"a": 4, "b": 4}
"""Decodes with three drafts each."""
UNDRAFTED = {"a": 4, "b": 1}
"""One request without drafts beside one with them."""
PROMPTS = {"a": 1, "b": 1, "c": 5}
LONG = {"a": 1, "b": 1, "c": 40}
Make = Callable[..., Any]


@pytest.fixture(params=[Manager, VarlenManager])
def make(request: pytest.FixtureRequest, engine_config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Return what makes a runner of an engine with graphs of some mode, the only pipeline stage."""
    stage = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    monkeypatch.setattr(cudagraph_utils, "get_pp_group", lambda: stage)
    monkeypatch.setattr(type(current_platform), "get_global_graph_pool", lambda _self: None)

    def make(mode: str = "FULL_AND_PIECEWISE", *, has_taps: bool = True, decode_query_len: int = 1) -> Any:
        config = copy.copy(engine_config)
        config.compilation_config = on_gpu(mode)
        graphs = StepGraphs(is_cut=has_taps and cut_at_taps(config.compilation_config))
        return request.param(config, graphs, decode_query_len)

    return make


def test_a_step_with_interventions_gets_pieces_or_nothing(make: Make) -> None:
    runner = make()
    runner.graphs.begin_step({}, set(), DECODING)
    assert [runner.choice(step) for step in (DECODING, PROMPTS, LONG)] == [
        (FULL, 4),
        (PIECEWISE, 8),
        (NONE, 42),
    ]
    runner.graphs.end_step()
    runner.graphs.begin_step({"b": None}, set(), DECODING)
    assert runner.choice(DECODING) == (PIECEWISE, 4)
    assert [runner.choice(step) for step in (PROMPTS, LONG)] == [(PIECEWISE, 8), (NONE, 42)]


def test_full_graphs_are_back_without_the_request(make: Make) -> None:
    runner = make()
    runner.graphs.begin_step({"b": None}, set(), DECODING)
    runner.graphs.end_step()
    runner.graphs.begin_step({}, set(), DECODING)
    assert runner.choice(DECODING)[0] == PIECEWISE
    runner.graphs.end_step()
    others = {"a": 1, "c": 1}  # it waits
    runner.graphs.begin_step({}, set(), others)
    assert runner.choice(others) == (FULL, 2)
    runner.graphs.end_step()
    runner.graphs.begin_step({}, {"b"}, DECODING)  # one of the same name
    assert runner.choice(DECODING)[0] == FULL


@pytest.mark.parametrize(
    ("decoding", "num_padded"),
    [pytest.param(DECODING, 4, id="no drafts"), pytest.param(DRAFTED, 8, id="three drafts")],
)
@pytest.mark.parametrize(
    ("mode", "idle", "intervening"),
    [
        ("FULL_AND_PIECEWISE", FULL, PIECEWISE),
        ("PIECEWISE", PIECEWISE, PIECEWISE),
        ("FULL", FULL, NONE),
        ("FULL_DECODE_ONLY", FULL, NONE),
        ("NONE", NONE, NONE),
    ],
)
def test_every_mode_of_graphs(
    make: Make, mode: str, idle: str, intervening: str, decoding: dict[str, int], num_padded: int
) -> None:
    runner = make(mode, decode_query_len=max(decoding.values()))
    assert runner.choice(decoding)[0] == idle
    runner.graphs.begin_step({"b": None}, set(), decoding)
    num_rows = sum(decoding.values()) if intervening == NONE else num_padded
    assert runner.choice(decoding) == (intervening, num_rows)
    runner.graphs.end_step()
    assert runner.choice(decoding)[0] == idle


@pytest.mark.parametrize(
    ("make", "idle"),
    [(Manager, PIECEWISE), (VarlenManager, FULL)],
    indirect=["make"],
)
def test_a_request_without_drafts_among_drafted_ones_needs_pieces(make: Make, idle: str) -> None:
    runner = make(decode_query_len=4)
    runner.graphs.begin_step({}, set(), UNDRAFTED)
    assert runner.choice(UNDRAFTED) == (idle, 8)
    runner.graphs.end_step()
    runner.graphs.begin_step({"b": None}, set(), UNDRAFTED)
    assert runner.choice(UNDRAFTED) == (PIECEWISE, 8)


# Full graphs with interventions.


@pytest.fixture
def able(make: Make) -> Make:
    """Return what makes a runner with such graphs, whose table has room for eight instructions."""

    def able(mode: str = "FULL_AND_PIECEWISE", *, decode_query_len: int = 1) -> Any:
        runner = make(mode, decode_query_len=decode_query_len)
        own = make("FULL_DECODE_ONLY", decode_query_len=decode_query_len)
        table = SimpleNamespace(max_instructions=8)
        runner.graphs.captured = SimpleNamespace(manager=own, table=table)
        return runner

    return able


@pytest.mark.parametrize(
    ("intervening", "decoding", "prompts"),
    [
        pytest.param({"b": 8}, FULL, PIECEWISE, id="as many instructions as there is room for"),
        pytest.param({"a": 4, "b": 4}, FULL, PIECEWISE, id="of two requests"),
        pytest.param({"a": 4, "b": 5}, PIECEWISE, PIECEWISE, id="too many"),
        pytest.param({"a": 1, "b": None}, PIECEWISE, PIECEWISE, id="other work"),
        pytest.param({"a": 1, "z": None}, FULL, PIECEWISE, id="other work of one that waits"),
    ],
)
@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "FULL", "FULL_DECODE_ONLY"])
def test_steps_whose_operations_fit_are_full_graphs(
    able: Make, mode: str, intervening: dict[str, int | None], decoding: str, prompts: str
) -> None:
    runner = able(mode)
    if mode != "FULL_AND_PIECEWISE":
        decoding, prompts = decoding.replace(PIECEWISE, NONE), NONE
    runner.graphs.begin_step(intervening, set(), DECODING)
    assert runner.choice(DECODING)[0] == decoding
    assert runner.choice(PROMPTS)[0] == prompts
    runner.graphs.end_step()
    runner.graphs.begin_step({}, set(intervening), DECODING)
    assert runner.choice(DECODING)[0] == FULL


def test_drafts_need_room_too(able: Make) -> None:
    runner = able(decode_query_len=4)
    runner.graphs.begin_step({"b": 2}, set(), DRAFTED)
    assert runner.choice(DRAFTED) == (FULL, 8)
    runner.graphs.begin_step({"a": 1}, set(), DRAFTED)
    assert runner.choice(DRAFTED)[0] == PIECEWISE


def test_a_replay_is_of_the_graphs_that_were_chosen(able: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, replayed = able(), list[Any]()
    captured = runner.graphs.captured
    monkeypatch.setattr(captured.manager, "run_fullgraph", replayed.append)
    monkeypatch.setattr(CudaGraphManager, "run_fullgraph", lambda *_: replayed.append("vLLM's own"))

    def replay(table: Any, run: Callable[[], Any]) -> None:
        replayed.append(table)
        run()

    for intervening in ({"b": 1}, {}):
        runner.graphs.begin_step(intervening, set() if intervening else {"b"}, DECODING)
        with runner.graphs.constraining(runner, replay):
            runner.run_fullgraph("the batch")
    assert replayed == [captured.table, "the batch", "vLLM's own"]


def test_pieces_that_do_not_end_at_taps_are_not_replayed(make: Make) -> None:
    runner = make(has_taps=False)
    runner.graphs.begin_step({"b": None}, set(), DECODING)
    assert [runner.choice(step) for step in (DECODING, PROMPTS)] == [(NONE, 3), (NONE, 7)]


@pytest.mark.parametrize("make", [Manager], indirect=True)
def test_breakable_graphs_are_not_replayed(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = make()
    monkeypatch.setattr(manager, "use_breakable_cg", True)
    assert manager.choice(PROMPTS)[0] == PIECEWISE
    manager.graphs.begin_step({"b": None}, set(), PROMPTS)
    assert manager.choice(PROMPTS) == (NONE, 7)


# An engine whose model is cut.


def report_on(kind: EngineKind, folder: Path) -> Any:
    """Run one engine of a kind that is cut, and one without drafts that is not."""
    checks = "tests.e2e.cuda_graphs_check"
    return report_of(checks, folder, [str(kind)], environment=environment(kind))[str(kind)]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return report_on(DEFAULT, tmp_path_factory.mktemp("graphs"))


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


INSIDE = ("inside", "at_taps", "going_on_inside")
"""Those whose work no full graph can do."""


def test_its_steps_are_graphs_or_pieces(report: Any) -> None:
    steps = {name: report["cut"][name]["steps"] for name in REQUESTS}
    for name in REQUESTS[:-1]:
        mode = PIECEWISE if name in INSIDE else FULL
        assert steps[name] == [[PIECEWISE, 8], [mode, 1], [mode, 1], [mode, 1]], name
    assert steps["together"] == [[NONE, 15], [FULL, 4], [FULL, 4], [FULL, 4]]


def test_its_interventions_run_where_they_run_without_pieces(report: Any) -> None:
    tiers = {name: report["cut"][name]["tiers"] for name in REQUESTS}
    assert tiers["plain"] == {"plain": 4}
    for name in ("steered", "captured", "together"):
        assert tiers[name] == {"tap": 1, "graph": 3}
    assert tiers["at_taps"] == {"tap": 4}
    for name in ("inside", "going_on_inside"):
        assert tiers[name] == {"eager": 4}


# The same with drafts.


@pytest.fixture(scope="module")
def drafted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return report_on(
        dataclasses.replace(DEFAULT, speculation="self_draft"), tmp_path_factory.mktemp("drafted")
    )


def test_it_answers_with_drafts_what_an_engine_without_pieces_answers_without(drafted: Any) -> None:
    for name in REQUESTS:
        own, expected = drafted["cut"][name], drafted["eager"][name]
        assert own["tokens"] == expected["tokens"], name
        assert own.get("off", 0.0) < 1e-5, name


def test_its_drafted_decode_is_a_full_graph_where_all_fits(drafted: Any) -> None:
    steps = {name: drafted["cut"][name]["steps"] for name in REQUESTS}
    # The last one was planned before the drafts of the one before were judged.
    assert steps["plain"] == [[PIECEWISE, 8], [FULL, 4], [FULL, 4]]
    for name in ("steered", "captured"):  # fewer drafts are accepted
        first, *others = steps[name]
        assert first == [PIECEWISE, 8]
        assert {tuple(step) for step in others} == {(FULL, 4)}, name
    for name in INSIDE:
        assert {mode for mode, _ in steps[name]} == {PIECEWISE}, name
    for name in ("at_taps", "going_on_inside"):  # traces take no drafts
        assert len(steps[name]) == NUM_TOKENS
