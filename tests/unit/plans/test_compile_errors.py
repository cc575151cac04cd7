"""Requests that cannot be served on this model and prompt: code, field and message."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.interventions import parse_interventions
from api_schemas.tensors import TensorObject
from nnsight_engine.core.model_spec import LeafSpec, ModelSpec
from nnsight_engine.plans.compile import tensors
from tests.fakes.model_specs import VALUE_OPERATIONS, tiny_spec
from tests.unit.plans.compiling import compiled

SPEC = tiny_spec(
    LeafSpec("moe.router", (5,), "eager", VALUE_OPERATIONS, (1, 2, 3)),
    LeafSpec("moe.experts", (2,), "eager", ("ablate", "patch", "capture"), (1, 2, 3)),
    LeafSpec("moe.weights", (2,), "eager", VALUE_OPERATIONS, (1, 2, 3)),
    LeafSpec("mixer.state", (2, 3, 4), "eager", ("capture",), (0, 2)),
    dtype="bfloat16",
    max_capture_bytes=4096,
)
PROMPT = [10, 11, 12, 13, 11]
VECTOR = [1.0] * 8
STEER: dict[str, Any] = {"op": "steer", "at": "layers.1.output", "vector": VECTOR}
SEVERAL: dict[str, Any] = {
    "op": "steer",
    "at": "layers.1.output",
    "vectors": [{"vector": VECTOR}, {"vector": [0.0, *VECTOR[1:]]}],
}
ABLATE: dict[str, Any] = {"op": "ablate", "at": "layers.1.output"}
PATCH: dict[str, Any] = {
    "op": "patch",
    "at": "layers.1.output",
    "values": [VECTOR] * 2,
    "where": {"positions": [0, 1]},
}
CAPTURE: dict[str, Any] = {"op": "capture", "at": "layers.1.output"}
STATE: dict[str, Any] = {"op": "capture", "at": "layers.*.mixer.state"}
LENS: dict[str, Any] = {"op": "logit_lens"}
EXPERTS: dict[str, Any] = {"op": "ablate", "at": "layers.1.moe.experts", "method": "vector"}


def refused(
    *raw: dict[str, Any],
    spec: ModelSpec = SPEC,
    prompt: list[int] = PROMPT,
    max_tokens: int = 8,
    prompt_logprobs: bool = False,
) -> ApiError:
    parse_interventions(list(raw))
    with pytest.raises(ApiError) as caught:
        compiled(*raw, spec=spec, prompt=prompt, max_tokens=max_tokens, prompt_logprobs=prompt_logprobs)
    assert caught.value.status == 400
    assert len(caught.value.message) < 700
    return caught.value


def tensor(dtype: Any, shape: list[int], data: bytes) -> dict[str, Any]:
    return TensorObject.from_bytes(dtype, shape, data).model_dump()


MISFITS: dict[ErrorCode, list[tuple[dict[str, Any], str]]] = {
    ErrorCode.UNKNOWN_POINT: [
        (STEER | {"at": "layers.1.attn.latent"}, "at"),
        (STEER | {"at": "layers.1.mixer.output"}, "at"),
        (STEER | {"at": "layers.1.logits"}, "at"),
        (STEER | {"at": ["logits", "nowhere"]}, "at.1"),
        (CAPTURE | {"at": "layers.1.mixer.state"}, "at"),
        (STEER | {"at": "layers.0.moe.weights"}, "at"),
    ],
    ErrorCode.UNKNOWN_LAYER: [
        (STEER | {"at": "layers.4.output"}, "at"),
        (STEER | {"at": "layers.2:5.output"}, "at"),
        (LENS | {"layers": [0, 4]}, "layers.1"),
        (LENS | {"layers": [10**3000]}, "layers.0"),
        (LENS | {"layers": "0:9"}, "layers"),
        (LENS | {"layers": "some"}, "layers"),
    ],
    ErrorCode.INVALID_VALUE: [
        (LENS | {"layers": [1, -3]}, "layers.1"),
        (PATCH | {"values": [VECTOR] * 3}, "values"),
        (PATCH | {"where": {"positions": [0, -5]}}, "where.positions"),
        (PATCH | {"where": {"positions": [0, 1], "tokens": [10]}}, "where"),
        (PATCH | {"where": {"positions": [0, 1], "range": [0, 3]}}, "where"),
        (STEER | {"vector": [0.0] * 8, "mode": "clamp"}, "vector"),
        (STEER | {"vector": [1e-30] * 8, "mode": "norm_match"}, "vector"),
        (STEER | {"vector": [1e30] * 8, "mode": "project_out"}, "vector"),
        (STEER | {"vector": [0.0] * 8, "mode": "affine", "gain": 2}, "vector"),
        (
            SEVERAL
            | {"vectors": [{"vector": VECTOR}, {"vector": VECTOR, "weight": -1}], "mode": "norm_match"},
            "vectors",
        ),
        (
            SEVERAL | {"vectors": [{"vector": VECTOR}, {"vector": [0.0] * 8}], "mode": "project_out"},
            "vectors.1.vector",
        ),
        (SEVERAL | {"vectors": [{"vector": VECTOR}] * 9, "mode": "project_out"}, "vectors"),
        (STEER | {"at": ["layers.1.output", "layers.1.output"]}, "at.1"),
        (STEER | {"at": ["layers.-3.output", "layers.1.output"]}, "at.1"),
        (STEER | {"at": ["layers.*.output", "layers.3.input"]}, "at.1"),
        (STEER | {"at": ["layers.0.input", "embed.output"]}, "at.1"),
        (ABLATE | {"units": [8]}, "units.0"),
        (ABLATE | {"units": [0, -1]}, "units.1"),
        (ABLATE | {"units": [3, 3]}, "units"),
        (ABLATE | {"units": []}, "units"),
        (LENS | {"targets": [3, "abc"]}, "targets.1"),
        (EXPERTS | {"vector": [1, 5]}, "vector"),
        (EXPERTS | {"vector": [-1, 1]}, "vector"),
        (EXPERTS | {"vector": [1.5, 1]}, "vector"),
        (EXPERTS | {"vector": [2, 2]}, "vector"),
        (PATCH | {"at": "layers.1.moe.experts", "values": [[0, 1], [3, 3]]}, "values"),
    ],
    ErrorCode.UNSUPPORTED_AT_POINT: [
        (STEER | {"at": "samples"}, "at"),
        (STEER | {"at": "layers.*.attn.pattern"}, "at"),
        (SEVERAL | {"at": "samples"}, "at"),
        (STEER | {"at": "layers.1.moe.experts"}, "at"),
        (STEER | {"at": "layers.0.mixer.state"}, "at"),
        (STATE, "where"),
        (STATE | {"where": {"phase": "prompt"}}, "where"),
        (STATE | {"where": {"positions": [-2, -1]}}, "where"),
        (STATE | {"where": {"tokens": [11], "range": [1, None]}}, "where"),
    ],
    ErrorCode.WRONG_WIDTH: [
        (STEER | {"vector": [1.0] * 7}, "vector"),
        (STEER | {"vector": []}, "vector"),
        (STEER | {"vector": [VECTOR] * 2}, "vector"),
        (STEER | {"vector": [[[1.0] * 8]]}, "vector"),
        (STEER | {"vector": tensor("float32", [], b"\x00\x00\x00\x00")}, "vector"),
        (STEER | {"at": ["logits", "layers.0.output"]}, "vector"),
        ({"op": "probe", "at": "layers.0.mlp.act", "weights": VECTOR}, "weights"),
        (ABLATE | {"method": "vector", "vector": [1.0]}, "vector"),
        (PATCH | {"values": [[1.0] * 7] * 2}, "values"),
        (PATCH | {"values": VECTOR}, "values"),
        (PATCH | {"values": [[VECTOR] * 2] * 2}, "values"),
        (SEVERAL | {"vectors": [{"vector": VECTOR}, {"vector": [1.0]}]}, "vectors.1.vector"),
        (SEVERAL | {"vectors": [{"vector": [VECTOR] * 2}]}, "vectors.0.vector"),
        (EXPERTS | {"vector": [1, 2, 3]}, "vector"),
    ],
    ErrorCode.CONTRADICTORY_WHERE: [
        (PATCH | {"where": {"positions": [0, 6], "phase": "generated"}}, "where.positions"),
        (ABLATE | {"method": "mean", "where": {"phase": "generated"}}, "where"),
    ],
    ErrorCode.NOT_FINITE: [
        (STEER | {"vector": [1e300] * 8}, "vector"),
        (STEER | {"vector": tensor("float32", [8], b"\x00\x00\x80\x7f" * 8)}, "vector"),
        (STEER | {"vector": tensor("float16", [8], b"\x00\xfc" * 8)}, "vector"),
        (STEER | {"vector": tensor("bfloat16", [8], b"\xc1\x7f" * 8)}, "vector"),
        (STEER | {"scale": 1e39}, "scale"),
        (STEER | {"vector": [1e30] * 8, "scale": -1e30}, "scale"),
        (STEER | {"vector": [1e30] * 8, "scale": 1e30, "mode": "replace"}, "scale"),
        ({"op": "probe", "at": "layers.0.output", "weights": VECTOR, "bias": -1e39}, "bias"),
        ({"op": "probe", "at": "layers.0.output", "weights": [3e38] * 8}, "weights"),
        (
            {"op": "probe", "at": "layers.0.output", "weights": tensor("bfloat16", [8], b"\x61\xff" * 8)},
            "weights",
        ),
        (
            {"op": "flag", "when": {"above": 0, "probe": {"at": "layers.0.output", "weights": [-1e17] * 8}}},
            "when.probe.weights",
        ),
        (STEER | {"mode": "affine", "gain": 1e39}, "gain"),
        (STEER | {"mode": "affine", "offset": -1e39}, "offset"),
        (STEER | {"mode": "clamp", "low": -1e39}, "low"),
        (STEER | {"mode": "clamp", "high": 1e39}, "high"),
        (SEVERAL | {"vectors": [{"vector": [1e300] * 8}]}, "vectors.0.vector"),
        (SEVERAL | {"vectors": [{"vector": VECTOR, "weight": 1e39}]}, "vectors"),
        (SEVERAL | {"vectors": [{"vector": VECTOR, "weight": 1e308}] * 9}, "vectors"),
        (SEVERAL | {"vectors": [{"vector": [3.4e38] * 8}]}, "vectors"),
        (SEVERAL | {"scale": 1e39}, "scale"),
        (SEVERAL | {"mode": "project_out", "scale": -1e39}, "scale"),
    ],
    ErrorCode.UNKNOWN_VECTOR: [
        (STEER | {"vector": {"name": "joy"}}, "vector"),
        (SEVERAL | {"vectors": [{"vector": {"name": "joy"}}]}, "vectors.0.vector"),
    ],
    ErrorCode.UNKNOWN_TOKEN: [
        (LENS | {"targets": ["two words"]}, "targets.0"),
        (LENS | {"targets": ["", 3]}, "targets.0"),
        (LENS | {"targets": [3, 100]}, "targets.1"),
        (STEER | {"where": {"tokens": [-1]}}, "where.tokens.0"),
        (STEER | {"where": {"tokens": [10**30]}}, "where.tokens.0"),
    ],
    ErrorCode.UNSUPPORTED_COMBINATION: [
        (CAPTURE | {"at": ["samples", "logits"]}, "at"),
        (CAPTURE | {"at": ["layers.0.attn.pattern", "layers.0.output"]}, "at"),
        (CAPTURE | {"at": "samples", "reduce": "mean"}, "at"),
        (CAPTURE | {"at": "layers.0.attn.pattern", "reduce": "mean"}, "reduce"),
        (EXPERTS | {"vector": [1, 2], "units": [0]}, "method"),
        (EXPERTS | {"vector": [1, 2], "at": ["layers.1.moe.experts", "layers.1.moe.weights"]}, "vector"),
        ({"op": "ablate", "at": "layers.1.moe.experts", "method": "mean"}, "method"),
        (CAPTURE | {"at": ["layers.0.mixer.state", "layers.0.output"], "where": {"positions": [-1]}}, "at"),
        (CAPTURE | {"at": ["layers.1.moe.experts", "layers.1.moe.weights"]}, "at"),
        (CAPTURE | {"at": "layers.1.moe.experts", "reduce": "mean"}, "at"),
        (CAPTURE | {"at": "layers.1.moe.experts", "dtype": "float32"}, "at"),
    ],
}


@pytest.mark.parametrize(
    ("operation", "code", "param"),
    [(operation, code, param) for code, rows in MISFITS.items() for operation, param in rows],
)
def test_an_operation_that_does_not_fit_the_model_is_refused(
    operation: dict[str, Any], code: ErrorCode, param: str
) -> None:
    error = refused(CAPTURE | {"where": {"positions": [0]}}, operation)
    assert (error.code, error.param) == (code, f"interventions.1.{param}")


@pytest.mark.parametrize(
    "where",
    [
        {"positions": [0]},
        {"positions": [-2, -1]},
        {"positions": [3, 6]},
        {"range": [0, 4]},
        {"phase": "prompt", "exclude": {"positions": [-1]}},
    ],
)
def test_sampled_tokens_of_positions_that_can_have_none_are_refused(where: dict[str, Any]) -> None:
    error = refused(CAPTURE | {"at": "samples", "where": where})
    assert (error.code, error.param) == (ErrorCode.POSITION_OUT_OF_RANGE, "interventions.0.where")
    assert "from the prompt's last position, 4, on" in error.message


@pytest.mark.parametrize(
    "where", [{}, {"positions": [-1]}, {"phase": "prompt"}, {"range": [0, None]}, {"phase": "generated"}]
)
def test_sampled_tokens_of_others_are_not(where: dict[str, Any]) -> None:
    made = compiled(CAPTURE | {"at": "samples", "where": where}, spec=SPEC, prompt=PROMPT, max_tokens=8)
    assert len(made.plan.ops) == 1


# Five prompt tokens and eight to generate, of which seven are fed back: positions 0 to 11.
NAMING_NOTHING: dict[ErrorCode, list[tuple[dict[str, Any], str]]] = {
    ErrorCode.POSITION_OUT_OF_RANGE: [
        ({"positions": [12]}, ".positions.0"),
        ({"positions": [0, -6]}, ".positions.1"),
        ({"positions": [10**3000]}, ".positions.0"),
        ({"positions": [5], "phase": "prompt"}, ".positions.0"),
        ({"exclude": {"positions": [12]}}, ".exclude.positions.0"),
        ({"range": [12, None]}, ".range.0"),
        ({"range": [-6, 3]}, ".range.0"),
        ({"range": [0, -6]}, ".range.1"),
    ],
    ErrorCode.EMPTY_WHERE: [
        ({"positions": []}, ".positions"),
        ({"tokens": []}, ".tokens"),
        ({"range": [3, 3]}, ".range"),
        ({"range": [4, -2]}, ".range"),
        ({"exclude": {"tokens": []}}, ".exclude.tokens"),
    ],
    ErrorCode.CONTRADICTORY_WHERE: [
        ({"phase": "generated", "positions": [0, -1]}, ""),
        ({"phase": "generated", "range": [0, 5]}, ""),
        ({"phase": "prompt", "range": [5, None]}, ""),
        ({"positions": [1, 2], "range": [3, 5]}, ""),
        ({"exclude": {}}, ""),
        ({"positions": [3], "exclude": {"range": [2, 4]}}, ""),
        ({"phase": "prompt", "exclude": {"phase": "prompt"}}, ""),
        ({"tokens": [11], "exclude": {"tokens": [11, 12]}}, ""),
        ({"phase": "prompt", "tokens": [99]}, ""),
        ({"positions": [0], "tokens": [11]}, ""),
    ],
}


@pytest.mark.parametrize(
    ("where", "code", "param"),
    [(where, code, param) for code, rows in NAMING_NOTHING.items() for where, param in rows],
)
def test_a_where_that_names_nothing_is_refused(where: dict[str, Any], code: ErrorCode, param: str) -> None:
    error = refused(STEER | {"where": where})
    assert (error.code, error.param) == (code, f"interventions.0.where{param}")


def test_one_token_alone_has_no_generated_positions() -> None:
    error = refused(STEER | {"where": {"phase": "generated"}}, max_tokens=1)
    assert error.code is ErrorCode.CONTRADICTORY_WHERE
    assert "max_tokens" in error.message


@pytest.mark.parametrize(
    "operations",
    [
        [CAPTURE | {"name": "a"}, LENS | {"name": "a"}],
        [CAPTURE | {"name": "capture_1"}, CAPTURE],
        [STEER | {"name": "a"}, CAPTURE | {"name": "a"}],
    ],
)
def test_a_name_may_be_used_once(operations: list[dict[str, Any]]) -> None:
    error = refused(*operations)
    assert (error.code, error.param) == (ErrorCode.DUPLICATE_NAME, "interventions.1.name")


def test_captures_are_counted_before_anything_runs() -> None:
    prompt = [1] * 33
    capture = CAPTURE | {"at": "layers.*.output", "where": {"phase": "prompt"}, "dtype": "float32"}
    error = refused(capture, prompt=prompt)
    assert error.code is ErrorCode.CAPTURE_TOO_LARGE
    assert str(4 * 33 * 8 * 4) in error.message
    assert "4096" in error.message
    assert refused(*[LENS | {"top_k": 8}] * 2, prompt=[1] * 9).code is ErrorCode.CAPTURE_TOO_LARGE
    assert refused(CAPTURE | {"at": "logits"}, prompt=[1] * 21).code is ErrorCode.CAPTURE_TOO_LARGE


def test_a_mean_needs_the_prompt_in_one_step() -> None:
    error = refused(ABLATE | {"method": "mean"}, prompt=[1] * 33)
    assert error.code is ErrorCode.UNSUPPORTED_COMBINATION
    assert "32" in error.message


@pytest.mark.parametrize(
    "operation",
    [
        STEER | {"at": "logits", "vector": [1.0] * 100},
        ABLATE | {"at": "logits", "units": [3]},
        PATCH | {"at": "logits", "values": [[1.0] * 100], "where": {"positions": [-1]}},
    ],
)
def test_written_logits_and_prompt_logprobs_exclude_each_other(operation: dict[str, Any]) -> None:
    assert refused(operation, prompt_logprobs=True).code is ErrorCode.UNSUPPORTED_COMBINATION


def test_a_small_vocabulary_bounds_top_k() -> None:
    small = dataclasses.replace(SPEC, vocab_size=4)
    assert refused(LENS | {"top_k": 5}, spec=small).param == "interventions.0.top_k"


def test_a_model_without_a_lens_says_so() -> None:
    bare = dataclasses.replace(SPEC, leaves=SPEC.leaves[:2])
    assert refused(LENS, spec=bare).code is ErrorCode.UNSUPPORTED_AT_POINT


def test_a_request_cannot_have_millions_of_strings_tokenized() -> None:
    words = ["x" * (i % 90 + 1) + " " * (i // 90) for i in range(2000)]
    assert refused(STEER | {"where": {"tokens": words}}).code is ErrorCode.INVALID_VALUE


def test_the_vectors_of_a_request_have_a_limit_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "MAX_BYTES", 4 * 8 * 9)
    stack = SEVERAL | {"at": "layers.*.output", "vectors": [{"vector": [VECTOR] * 4}, {"vector": VECTOR}]}
    error = refused(SEVERAL, stack)
    assert (error.code, error.param) == (ErrorCode.TENSOR_TOO_LARGE, "interventions.1.vectors")
    assert refused(*[SEVERAL] * 5).param == "interventions.4.vectors"
