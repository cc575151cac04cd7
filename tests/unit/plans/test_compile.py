"""Requests that can be served: what their plans say."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from api_schemas.interventions import PromptOperations, parse_interventions
from nnsight_engine.core.model_spec import LeafSpec, ModelSpec
from nnsight_engine.plans.compile.request import compile_request
from nnsight_engine.plans.compile.tensors import CombinedVectors
from nnsight_engine.plans.request_plan import (
    NO_MEDIA,
    CompiledRequest,
    OperationKind,
    PlannedImage,
    PromptMedia,
    RequestPlan,
    WhereRule,
)
from nnsight_engine.plans.where import takes_drafts
from tests.fakes.model_specs import VALUE_OPERATIONS, tiny_spec
from tests.unit.plans import compiling
from tests.unit.plans.compiling import captured_bytes, token_of

SPEC = tiny_spec(dtype="bfloat16", max_capture_bytes=4096)
PROMPT = [10, 11, 12, 13, 11]


def compiled(
    *raw: dict[str, Any],
    prompt: list[int] = PROMPT,
    max_tokens: int = 8,
    media: PromptMedia = NO_MEDIA,
    spec: ModelSpec = SPEC,
) -> CompiledRequest:
    return compiling.compiled(*raw, spec=spec, prompt=prompt, max_tokens=max_tokens, stream=True, media=media)


def vector(width: int = 8) -> list[float]:
    return [float(i + 1) for i in range(width)]


def steer(**change: Any) -> dict[str, Any]:
    return {"op": "steer", "at": "layers.1.output", "vector": vector()} | change


def test_equal_vectors_are_held_once() -> None:
    request = compiled(steer(), steer(at="layers.2.output"))
    assert len(request.tensors) == 1
    assert {op.tensor for op in request.plan.ops} == set(request.tensors)


def test_a_difference_is_that_of_float32() -> None:
    rng = np.random.default_rng(0)
    first, second = rng.normal(size=(2, 8)).astype("<f4")
    several = [{"vector": first.tolist()}, {"vector": second.tolist(), "weight": -1}]
    (tensor,) = compiled(steer(vector=None, vectors=several)).tensors.values()
    assert tensor.data == (first - second).tobytes()


def test_vectors_are_combined_once_for_all_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    original = np.linalg.qr

    def counted(rows: Any) -> Any:
        calls.append(1)
        return original(rows)

    monkeypatch.setattr(np.linalg, "qr", counted)
    several = [{"vector": vector()}, {"vector": [1.0] * 8}]
    operations = tuple(parse_interventions([steer(mode="project_out", vector=None, vectors=several)]))
    combined = CombinedVectors(SPEC)
    combined.prepare(operations)
    for prompt in ([1, 2], [1, 2, 3]):
        request = compile_request(
            operations,
            spec=SPEC,
            prompt_token_ids=prompt,
            max_tokens=8,
            token_of=token_of,
            stream=False,
            combined=combined,
        )
        assert request.plan.ops[0].kind is OperationKind.SUBSPACE
        assert request.tensors[request.plan.ops[0].tensor].shape == (2, 8)
    assert len(calls) == 1


def test_reads_have_names_dtypes_and_bytes() -> None:
    operations = [
        steer(),
        {"op": "capture", "at": ["layers.0.output", "layers.0.mlp.act"], "where": {"positions": [-1, 9]}},
        {"op": "capture", "at": "layers.3.output", "reduce": "mean", "dtype": "float16", "name": "mean"},
        {"op": "capture", "at": "layers.3.output", "reduce": "last", "dtype": "float32"},
        {"op": "probe", "at": "layers.*.output", "weights": vector(), "bias": 0.5},
        {"op": "logit_lens", "layers": "1:3", "top_k": 2, "targets": ["abc", 4]},
        {"op": "capture", "at": "samples"},
    ]
    request = compiled(*operations)
    names = [op.name for op in request.plan.ops]
    assert names == ["", "capture_1", "mean", "capture_3", "probe_4", "logit_lens_5", "capture_6"]
    dtypes = [op.dtype for op in request.plan.ops if op.kind is OperationKind.CAPTURE]
    assert dtypes == ["bfloat16", "float16", "float32", "int64"]
    of_captures, of_probe, of_lens, of_samples = 24 * 2 + 8 * 4 + 8 * 4, 5 * 4 * 4, 5 * 2 * 4 * 8, 5 * 8
    wanted = of_captures + of_probe + of_lens + of_samples
    assert captured_bytes(*operations, spec=SPEC, prompt=PROMPT) == wanted


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        (steer(), False),
        ({"op": "capture", "at": "logits", "where": {"phase": "generated"}}, False),
        ({"op": "capture", "at": "layers.0.output", "where": {"tokens": [99]}}, False),
        ({"op": "capture", "at": "layers.0.output", "where": {"tokens": [11]}}, True),
        ({"op": "ablate", "at": "layers.0.output", "method": "mean"}, True),
        ({"op": "ablate", "at": "layers.0.output"}, False),
    ],
)
def test_the_prefix_cache_is_skipped_only_where_prompt_rows_are_needed(
    operation: dict[str, Any], expected: bool
) -> None:
    assert compiled(operation).reads_prompt is expected


def fingerprint(*raw: dict[str, Any], prompt: list[int] = PROMPT) -> str:
    return compiled(*raw, prompt=prompt).plan.fingerprint


def test_a_fingerprint_is_of_the_writes_alone() -> None:
    assert fingerprint({"op": "capture", "at": "logits", "where": {"positions": [-1]}}) == ""
    own = fingerprint(steer())
    assert len(own) == 64
    assert fingerprint(steer(name="x"), {"op": "logit_lens", "layers": [0]}) == own
    assert fingerprint(steer(), prompt=[1, 2, 3]) == own
    others = [
        fingerprint(steer(scale=2)),
        fingerprint(steer(vector=vector()[::-1])),
        fingerprint(steer(at="layers.2.output")),
        fingerprint(steer(mode="replace")),
        fingerprint(steer(where={"positions": [0]})),
        fingerprint(steer(), steer()),
    ]
    assert len({own, *others}) == 7


def test_what_depends_on_the_prompt_does_not_share_a_cache_with_other_prompts() -> None:
    generated = steer(where={"phase": "generated"})
    excluded = steer(where={"exclude": {"phase": "prompt"}})
    # The longer prompt may be the shorter one and its answer: the same tokens, written differently.
    for operation in (generated, excluded):
        assert fingerprint(operation) != fingerprint(operation, prompt=[*PROMPT, 1])
        assert fingerprint(operation) == fingerprint(operation, prompt=[5, 4, 3, 2, 1])
    mean = {"op": "ablate", "at": "layers.0.output", "method": "mean"}
    assert fingerprint(mean) != fingerprint(mean, prompt=[*PROMPT[:-1], 99])
    assert fingerprint(mean) == fingerprint(mean, prompt=list(PROMPT))
    seen = [compiled(mean, media=PromptMedia((((1, 3),),), image)).plan.fingerprint for image in "aab"]
    assert seen[0] == seen[1] != seen[2]


def test_images_are_their_positions_in_the_order_of_a_patch_s_rows() -> None:
    media = PromptMedia((((0, 1), (2, 3)), ((4, 5),)), "d")
    values = [[float(row)] * 8 for row in range(3)]
    patch = {"op": "patch", "at": "layers.0.output", "values": values, "where": {"images": [1, 0]}}
    found = compiled(patch, media=media)
    assert found.plan.ops[0].where == WhereRule(positions=(0, 2, 4))
    (tensor,) = found.tensors.values()
    assert np.frombuffer(tensor.data, np.float32).reshape(3, 8)[:, 0].tolist() == [1, 2, 0]
    for where, expected in (
        ({"images": [0], "tokens": [12]}, WhereRule(positions=(0, 2), tokens=(12,))),
        ({"images": [0, -1], "positions": [1, 2, 4]}, WhereRule(positions=(2, 4))),
        ({"images": [-2, 0] * 50_000}, WhereRule(positions=(0, 2))),
        ({"exclude": {"images": [1]}}, WhereRule(exclude=WhereRule(positions=(4,)))),
    ):
        assert compiled(steer(where=where), media=media).plan.ops[0].where == expected


def test_rows_of_images_in_the_encoder_are_numbered_by_patch() -> None:
    encoder = LeafSpec("vision.layers.output", (6,), "tap", VALUE_OPERATIONS, tuple(range(9)), num_patches=2)
    spec = dataclasses.replace(SPEC, leaves=(*SPEC.leaves, encoder))
    media = PromptMedia((((0, 1), (2, 3)), ((4, 5),)), "d")
    values = [[float(row)] * 6 for row in range(6)]
    at = "vision.layers.-1.output"
    patch = {"op": "patch", "at": at, "values": values, "where": {"images": [1, 0]}}
    found = compiled(patch, {"op": "capture", "at": at, "where": {"images": [1]}}, spec=spec, media=media)
    assert found.plan.images == (PlannedImage(((0, 1), (2, 3)), 4), PlannedImage(((4, 5),), 2))
    write, read = found.plan.ops
    assert str(write.sites[0]) == "vision.layers.8.output"
    assert (write.where.positions, read.where.positions) == ((0, 1, 2, 3, 4, 5), (4, 5))
    (tensor,) = found.tensors.values()
    assert np.frombuffer(tensor.data, np.float32).reshape(6, 6)[:, 0].tolist() == [2, 3, 4, 5, 0, 1]
    assert found.reads_prompt
    assert takes_drafts(found.plan)
    assert RequestPlan.decode(found.plan.encode()) == found.plan
    assert ModelSpec.from_plain(spec.to_plain()) == spec
    assert not compiled(steer(), media=media).plan.images


def test_compiling_loads_neither_torch_nor_vllm() -> None:
    code = (
        "import sys, nnsight_engine.plans.compile.request, nnsight_engine.plans.where; "
        "sys.exit(bool({'torch', 'vllm', 'fastapi'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_prompt_has_its_own_operations_under_their_own_indices() -> None:
    operations = parse_interventions(
        [
            {"op": "probe", "at": "layers.1.output", "weights": vector(), "prompts": [1]},
            steer(prompts=[0, 2]),
            {"op": "capture", "at": "layers.2.output"},
            {"op": "capture", "at": "layers.3.output", "name": "capture_2", "prompts": [9]},
        ]
    )

    grouped = PromptOperations(operations)

    def plan(prompt_index: int) -> list[tuple[OperationKind, str]]:
        indexes, own = zip(*grouped.of(prompt_index), strict=True)
        request = compile_request(
            own, spec=SPEC, prompt_token_ids=PROMPT, max_tokens=8, token_of=token_of, stream=True,
            indexes=indexes,
        )  # fmt: skip
        return [(op.kind, op.name) for op in request.plan.ops if op.reads or op.kind is OperationKind.ADD]

    assert plan(1) == [(OperationKind.PROBE, "probe_0"), (OperationKind.CAPTURE, "capture_2")]
    assert [kind for kind, _ in plan(2)] == [OperationKind.ADD, OperationKind.CAPTURE]
