"""Sweeps: the axes of a grid, the number of a metric, and what a request may not say."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import pytest

from api_schemas.errors import ApiError
from api_schemas.generation import TokenizePrompt, TokenizeRequest
from api_schemas.server import Capabilities
from api_schemas.sweeps import AnySweep, SweepRequest
from api_schemas.tensors import TensorObject
from app.engine.client import EngineReply
from app.http.errors import validated
from app.services.sweeps.grid import grid_of
from app.services.sweeps.metrics import divergence, metric_operation, perplexity, reading_of
from app.services.sweeps.prompts import SweptPrompt, continuation_of
from app.services.sweeps.writes import Cell, CellWrites, random_like
from tests.fakes.results import CAPABILITIES

PROMPTS: Final = [{"clean": "a b c", "corrupted": "d e f"}]
LOGPROB: Final = {"type": "logprob", "token": " Paris"}
PATCH: Final[dict[str, Any]] = {"method": "patch", "prompts": PROMPTS, "metric": LOGPROB}
ABLATE: Final[dict[str, Any]] = {**PATCH, "method": "ablate"}
STEER: Final[dict[str, Any]] = {**PATCH, "method": "steer", "vector": [3.0, 4.0], "strengths": [0, 2.5]}
FEATURE: Final[dict[str, Any]] = {
    **PATCH, "method": "feature", "dictionary": "topics", "features": [7, "law"], "values": [1, 2, 3],
}  # fmt: skip
ALL: Final = (PATCH, ABLATE, STEER, FEATURE)
HEADS: Final = {
    "name": "layers.*.attn.heads", "shape": [3, 4], "width": 12, "tier": "tap",
    "operations": ["patch", "ablate", "steer"], "layers": [1, 3],
}  # fmt: skip
MODEL: Final = Capabilities.model_validate(
    {**CAPABILITIES.model_dump(), "points": [*CAPABILITIES.model_dump()["points"], HEADS]}
)


def parsed(body: dict[str, Any], **more: object) -> AnySweep:
    return validated(SweepRequest, {**body, **more}).root


def refused(body: dict[str, Any], *lengths: int, **more: object) -> tuple[str, str | None]:
    with pytest.raises(ApiError) as caught:
        grid_of(parsed(body, **more), MODEL, lengths or [3])
    return caught.value.code, caught.value.param


def test_the_axes_are_those_of_the_method_and_cells_are_in_order() -> None:
    grid = grid_of(parsed(PATCH, layers=[0, -1], positions="all"), MODEL, [3])
    assert (grid.dims, grid.num_cells) == (["layer", "position"], 6)
    assert (grid.axes["layer"], grid.axes["position"]) == ([0, 3], [0, 1, 2])
    first, second, *_, last = grid.cells()
    assert (first["position"], second["position"], last["layer"], last["position"]) == (0, 1, 1, 2)
    assert grid.point_of(last) == "layers.3.output"
    heads = grid_of(
        parsed(ABLATE, points=["layers.{layer}.attn.heads"], layers=[1, 3], heads="all"), MODEL, [3]
    )
    assert (heads.dims, heads.axes["head"]) == (["layer", "head"], [0, 1, 2])
    several = ["layers.{layer}.output", "layers.{layer}.input"]
    steered = grid_of(parsed(STEER, points=several, positions=[-1, 0]), MODEL, [3, 5])
    assert steered.dims == ["prompt", "point", "layer", "position", "strength"]
    assert (steered.axes["position"], steered.shape) == ([-1, 0], (2, 2, 4, 2, 2))
    features = grid_of(parsed(FEATURE, positions="last"), MODEL, [3])
    assert (features.dims, features.axes["position"]) == (["position", "feature", "value"], [2])
    named = grid_of(parsed(ABLATE, points=["layers.2.output"]), MODEL, [3])
    assert (named.dims, named.num_cells) == ([], 1)
    negative = grid_of(parsed(PATCH, points=["layers.-1.output"]), MODEL, [3])
    assert (negative.axes["point"], negative.points) == (["layers.-1.output"], {(0, 0): "layers.3.output"})


def test_what_is_not_there_is_refused_with_its_field() -> None:
    every_head = {"points": ["layers.{layer}.attn.heads"], "layers": [1, 3]}
    assert refused(PATCH, layers=[9]) == ("unknown_layer", "layers.0")
    assert refused(PATCH, layers="0:9")[0] == "unknown_layer"
    assert refused(PATCH, layers=[1, -3])[0] == "invalid_value"
    assert refused(PATCH, points=["layers.{layer}.nothing"]) == ("unknown_point", "points.0")
    assert refused(PATCH, points=["layers.*.output"]) == ("unknown_point", "points.0")
    assert refused(PATCH, points=["nothing"]) == ("unknown_point", "points.0")
    assert refused(PATCH, points=["layers.{layer}.attn.heads"])[0] == "unknown_point"  # not at layer 0
    assert refused(PATCH, points=["layers.{layer}.output", "layers.1.input"])[1] == "points"
    assert refused(PATCH, points=["layers.1.input"], layers=[1])[0] == "unsupported_combination"
    assert refused(PATCH, heads="all") == ("unsupported_at_point", "heads")
    assert refused(PATCH, **every_head, heads=[0, 3]) == ("invalid_value", "heads.1")
    assert refused(PATCH, positions=[0, 3]) == ("position_out_of_range", "positions.1")
    assert refused(PATCH, positions=[-4]) == ("position_out_of_range", "positions.0")
    assert refused(PATCH, positions=[0, -3]) == ("invalid_value", "positions")
    assert refused(PATCH, 3, 4, positions="all") == ("invalid_value", "positions")
    for at, code in (
        ("layers.*.output", "invalid_value"), ("layers.9.output", "unknown_layer"), ("x", "unknown_point"),
    ):  # fmt: skip
        probe = {"type": "probe", "at": at, "weights": [1.0] * 8}
        assert refused(PATCH, metric=probe) == (code, "metric.at")


@pytest.mark.parametrize("body", ALL, ids=lambda body: body["method"])
@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"prompts": []}, "prompts"),
        ({"prompts": PROMPTS * 65}, "prompts"),
        ({"prompts": [{"clean": ""}]}, "prompts.0.clean"),
        ({"prompts": [{"clean": []}]}, "prompts.0.clean"),
        ({"prompts": [{"clean": [1, -1]}]}, "prompts.0.clean.1"),
        ({"prompts": [{"clean": [1, True]}]}, "prompts.0.clean.1"),
        ({"prompts": [{"clean": 7}]}, "prompts.0.clean"),
        ({"prompts": [{"corrupted": "a"}]}, "prompts.0.clean"),
        ({"metric": {"type": "magic"}}, "metric"),
        ({"metric": {"type": "logprob"}}, "metric.token"),
        ({"metric": {"type": "logprob", "token": 1.5}}, "metric.token"),
        ({"metric": {"type": "logit_difference", "token": 1}}, "metric.other"),
        ({"metric": {"type": "kl", "token": 1}}, "metric"),
        ({"metric": {"type": "perplexity", "continuation": []}}, "metric.continuation"),
        ({"metric": {"type": "probe", "at": "layers.1.output", "weights": "no name!"}}, None),
        ({"positions": "some"}, "positions"),
        ({"positions": []}, "positions"),
        ({"positions": [1, 1]}, "positions"),
        ({"positions": [*range(4097)]}, "positions"),
        ({"positions": ["a" * 9]}, "positions.0"),
        ({"stream": "yes"}, "stream"),
        ({"model": 7}, "model"),
        ({"magic": 1}, None),
        ({"method": "magic"}, None),
    ],
    ids=str,
)
def test_what_no_sweep_may_say(body: dict[str, Any], more: dict[str, Any], param: str | None) -> None:
    if "weights" in more.get("metric", {}):
        parsed(body, **more)  # a name, which is looked up later
        return
    with pytest.raises(ApiError) as caught:
        parsed(body, **more)
    assert caught.value.code in {"invalid_shape", "invalid_value"}
    assert param is None or (caught.value.param or "").startswith(param), caught.value.param


@pytest.mark.parametrize(
    ("body", "more"),
    [
        *((body, {"points": wrong}) for body in (PATCH, ABLATE, STEER) for wrong in ([], ["a", "a"], "a")),
        *((body, {"layers": []}) for body in (PATCH, ABLATE, STEER)),
        *((body, {"heads": wrong}) for body in (PATCH, ABLATE) for wrong in ([], [-1], [0, 0], "some")),
        *((PATCH, {"direction": wrong}) for wrong in ("both", None)),
        *((ABLATE, {"ablation": wrong}) for wrong in ("vector", 0)),
        *((STEER, {"strengths": wrong}) for wrong in ([], [1, 1], ["1"], 1, [math.inf])),
        *((STEER, more) for more in ({"mode": "affine"}, {"seed": -1}, {"control": 1}, {"heads": "all"})),
        *((FEATURE, {"features": wrong}) for wrong in ([], [7, 7], [-1], [""])),
        *((FEATURE, {"values": wrong}) for wrong in ([], [1, 1.0], [None])),
        *((FEATURE, more) for more in ({"mode": "ablate"}, {"points": ["layers.{layer}.output"]})),
        *((body, {"where": {}, "positions": "all"}) for body in (ABLATE, STEER, FEATURE)),
        (PATCH, {"where": {"range": [1, None]}}),
        (PATCH, {"strengths": [1]}),
    ],
    ids=str,
)
def test_what_a_method_may_not_say(body: dict[str, Any], more: dict[str, Any]) -> None:
    with pytest.raises(ApiError):
        parsed(body, **more)


@pytest.mark.parametrize("body", [ABLATE, STEER, FEATURE], ids=lambda body: body["method"])
@pytest.mark.parametrize("field", ["positions", "tokens"])
def test_where_is_bounded(body: dict[str, Any], field: str) -> None:
    for part, param in ((lambda one: one, "where"), (lambda one: {"exclude": one}, "where.exclude")):
        parsed(body, where=part({field: [*range(1024)]}))
        with pytest.raises(ApiError) as caught:
            parsed(body, where=part({field: [*range(1025)]}))
        assert (caught.value.code, caught.value.param) == ("invalid_value", f"{param}.{field}")


def test_prompts_are_text_and_images_are_refused() -> None:
    chat = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    parsed(ABLATE, prompts=[{"clean": chat}, {"clean": [1, 2]}, {"clean": "a"}])
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
    with pytest.raises(ApiError) as caught:
        parsed(ABLATE, prompts=[{"clean": image}])
    assert caught.value.code == "unsupported_combination"


def test_a_patch_of_one_head_leaves_the_others_as_they_are() -> None:
    wanted = parsed(PATCH, points=["layers.{layer}.attn.heads"], layers=[1], heads=[2], positions=[1])
    grid = grid_of(wanted, MODEL, [3])
    writes = CellWrites(wanted, grid)
    prompt = SweptPrompt([0, 1, 2], [3, 4, 5], [3, 4, 5], ["d", "e", "f"])
    point = "layers.1.attn.heads"
    prompt.rows = {point: {1: np.arange(12, dtype=np.float32)}}
    prompt.own_rows = {point: {1: -np.ones(12, np.float32)}}
    (at,) = grid.cells()
    patch: Any = writes.of(Cell(0, at), prompt)
    assert (patch.at, patch.where.positions) == (point, [1])
    written = np.frombuffer(patch.values.raw, "<f4")
    assert written.tolist() == [-1.0] * 8 + [8.0, 9.0, 10.0, 11.0]
    assert writes.num_bytes([prompt]) == 2 * 12 * 4
    both = [writes.captures(prompt, is_changed=one)[0][0] for one in (False, True)]
    assert all(one.where.positions == [1] for one in both if one.op == "capture")


def test_large_captures_are_split_into_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    several = ["layers.{layer}.output", "layers.{layer}.input"]
    wanted = parsed(PATCH, points=several, layers=[0, 1], positions="all")
    prompt = SweptPrompt([0, 1, 2], [3, 4, 5], [3, 4, 5], ["d", "e", "f"])
    writes = CellWrites(wanted, grid_of(wanted, MODEL, [3]))
    row = 8 * 4

    def split(num_rows: int) -> list[list[tuple[Any, ...]]]:
        monkeypatch.setattr("app.services.sweeps.writes._CAPTURED_BYTES", num_rows * row)
        asked: Any = writes.captures(prompt, is_changed=False)
        return [[(one.name, one.at, one.where.positions) for one in captures] for captures in asked]

    outputs, inputs = [[f"layers.{layer}.{name}" for layer in (0, 1)] for name in ("output", "input")]
    every = [0, 1, 2]
    assert split(12) == [[("rows0", outputs, every), ("rows1", inputs, every)]]
    assert split(9) == [
        [("rows0", outputs, every), ("rows1", inputs[:1], every)], [("rows1", inputs[1:], every)],
    ]  # fmt: skip
    assert [at for captures in split(2) for _, (at,), _ in captures] == [*outputs, *inputs] * 2
    assert [positions for captures in split(2) for *_, positions in captures] == [[0, 1]] * 4 + [[2]] * 4
    assert writes.captures(prompt, is_changed=True) == [[]]


def test_a_control_is_random_as_long_as_the_vector_and_the_same_for_a_seed() -> None:
    first, again, other = [random_like([3.0, 4.0, 0.0], seed) for seed in ((0, 1), (0, 1), (1, 1))]
    assert first.raw == again.raw != other.raw
    assert np.linalg.norm(np.frombuffer(first.raw, "<f4")) == pytest.approx(5.0)
    for odd in (TensorObject.from_bytes("float32", [], b"\0" * 4), [], [1e300, 0.0]):
        random_like(odd, (0, 1))


@pytest.mark.parametrize(
    ("result", "found"),
    [
        ({"type": "logit_lens", "layers": {"3": [{"targets": [{"logprob": -1.5}]}]}}, -1.5),
        ({"type": "logit_lens", "layers": {"3": [{"targets": [{"logprob": -1}, {"logprob": -3}]}]}}, 2.0),
        ({"type": "logit_lens", "layers": {"3": [{"targets": [{"logprob": None}]}]}}, math.nan),
        ({"type": "probe", "points": {"layers.1.output": [0.5, 2.0]}}, 2.0),
        ({"type": "detect", "scores": [None]}, math.nan),
        ({"type": "features", "features": [[{"id": 7, "activation": 3.0}]]}, 3.0),
    ],
)
def test_a_metric_is_read_at_the_last_position(result: dict[str, Any], found: float) -> None:
    assert float(reading_of(result)) == pytest.approx(found, nan_ok=True)


async def test_a_continuation_needs_a_token_of_its_own() -> None:
    class Tokenizer:
        async def tokenize(self, wanted: TokenizeRequest, _: object) -> EngineReply:
            assert isinstance(wanted.root, TokenizePrompt)
            tokens = [{"id": index, "text": text} for index, text in enumerate(("<s>", *wanted.root.prompt))]
            return EngineReply(body={"tokens": tokens if wanted.root.prompt != "\u200b" else tokens[:1]})

    engine: Any = Tokenizer()
    http: Any = None
    found = parsed(ABLATE, metric={"type": "perplexity", "continuation": "ab"})
    assert await continuation_of(engine, found, http) == [1, 2]
    nothing = parsed(ABLATE, metric={"type": "perplexity", "continuation": "\u200b"})
    with pytest.raises(ApiError) as caught:
        await continuation_of(engine, nothing, http)
    assert (caught.value.code, caught.value.param) == ("invalid_value", "metric.continuation")


def test_divergence_and_perplexity() -> None:
    half = np.log(np.array([0.5, 0.5]))
    assert divergence(half, half) == 0
    assert divergence(half, np.log(np.array([0.25, 0.75]))) == pytest.approx(0.5 * math.log(4 / 3))
    certain = np.array([0.0, -math.inf])
    assert divergence(certain, half) == pytest.approx(math.log(2))
    assert divergence(certain, certain) == 0
    assert divergence(half, certain) == math.inf
    assert math.isnan(divergence(half, np.array([math.nan, 0.0])))
    logprobs = [None, {5: {"logprob": -9.0}}, {6: {"logprob": -1.0}}, {7: {"logprob": -3.0}}]
    assert float(perplexity(logprobs, [6, 7], 2)) == pytest.approx(math.exp(2))
    assert metric_operation(parsed(ABLATE, metric={"type": "perplexity", "continuation": "x"}).metric) is None
