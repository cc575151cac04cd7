"""Values that are read and written equal transformers' own, on the bundled model in float32.

Requests are as those of the fuzzer, whose reference tells what they read and do.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from nnsight_engine.plans.collect.results import CollectedProbe
from tests.e2e.fuzz.expected import Twin
from tests.e2e.fuzz.nearness import reduced
from tests.e2e.fuzz.vectors import sent
from tests.e2e.harness import Ask, Engine, Reply
from tests.narrow_model import PROMPT

pytestmark = pytest.mark.e2e

WIDTH: Final = 576
AT: Final = "layers.12.output"
Operations = list[dict[str, Any]]


@pytest.fixture(scope="module")
def engine(bundled: Path) -> Iterator[Engine]:
    with Engine(bundled, dtype="float32", block_size=32, max_num_batched_tokens=1024) as engine:
        yield engine


@pytest.fixture(scope="module")
def twin(bundled: Path, engine: Engine) -> Twin:
    return Twin(bundled, torch.float32, torch.float32, engine.token_ids)


def drawn(seed: int, *rows: int) -> dict[str, Any]:
    return {"normal": seed, "shape": [*rows, WIDTH], "norm": 24.0, "as": "numbers"}


def steer(**fields: Any) -> dict[str, Any]:
    return {"op": "steer", "at": AT, **fields}


def ablate(**fields: Any) -> dict[str, Any]:
    return {"op": "ablate", "at": AT, **fields}


def capture(at: str | list[str], name: str, **fields: Any) -> dict[str, Any]:
    return {"op": "capture", "at": at, "name": name, **fields}


EVERYWHERE: Final = [
    *("embed.output", "layers.*.output", "layers.*.attn.output", "layers.*.mlp.output"),
    *("norm.output", "logits"),
]
SOME: Final = {"where": {"range": [1, 6]}}
WIDTHS: Final = [AT, "layers.12.mlp.act", "layers.12.attn.output"]
CASES: Final[dict[str, Operations]] = {
    "reads everywhere": [capture(EVERYWHERE, "all")],
    "forms of reads": [
        capture(WIDTHS, "mean", reduce="mean"),
        capture(WIDTHS, "mean of some", reduce="mean", **SOME),
        capture(AT, "last", reduce="last"),
        capture(AT, "last of some", reduce="last", **SOME),
        {"op": "probe", "at": AT, "weights": drawn(1), "bias": 0.5, "name": "probed"},
    ],
    "add": [steer(vector=drawn(4), scale=2.0)],
    "add at some positions": [steer(vector=drawn(6), where={"positions": [0, 4]})],
    "add to each point its own": [steer(at=["layers.2.output", "layers.7.output"], vector=drawn(8, 2))],
    "norm_match": [steer(vector=drawn(4), scale=0.3, mode="norm_match")],
    "project_out": [steer(vector=drawn(4), mode="project_out")],
    "clamp": [steer(vector=drawn(4), scale=7.0, mode="clamp")],
    "clamp to a range": [steer(vector=drawn(4), low=-1.0, high=0.5, mode="clamp")],
    "affine": [steer(vector=drawn(4), gain=-2.0, offset=3.0, mode="affine")],
    "several vectors": [
        steer(
            vectors=[{"vector": drawn(4), "weight": 1.0}, {"vector": drawn(10), "weight": -0.5}],
            scale=0.3,
            mode="norm_match",
        )
    ],
    "out of a span": [steer(vectors=[{"vector": drawn(seed)} for seed in (4, 10, 11)], mode="project_out")],
    "replace": [steer(vector=drawn(4), scale=3.0, mode="replace")],
    "zero": [ablate()],
    "mean": [ablate(method="mean")],
    "mean of logits": [ablate(at="logits", method="mean")],
    "vector": [ablate(method="vector", vector=drawn(5))],
    "units": [ablate(units=[3, 100, 575])],
    "patch in the order of its positions": [
        {"op": "patch", "at": "layers.3.output", "values": drawn(2, 2), "where": {"positions": [5, 2]}},
        capture("layers.3.output", "patched"),
    ],
    "one after the other": [
        capture("layers.5.output", "before"),
        steer(at="layers.5.output", vector=drawn(7)),
        capture("layers.5.output", "between"),
        ablate(at="layers.6.input", where={"positions": [1]}),
        capture("layers.6.input", "after"),
    ],
}
LOGITS: Final = capture("logits", "logits")


def ask(case: str, max_tokens: int) -> Ask:
    return Ask(PROMPT, [sent(one) for one in [*CASES[case], LOGITS]], max_tokens=max_tokens)


def check(engine: Engine, twin: Twin, case: str, reply: Reply) -> None:
    """Compare an answer with transformers, over the prompt and the tokens that were generated."""
    operations, ids = [*CASES[case], LOGITS], engine.token_ids(PROMPT)
    expected = twin.run([*ids, *reply.token_ids[:-1]], len(ids), operations)
    assert reply.collected is not None, reply.failure
    applied = [one.positions for one in reply.collected.applied]
    assert applied == [expected.positions[index] for index in range(len(operations))]
    for index, op in enumerate(operations):
        for point, rows in expected.seen[index].rows.items():
            wanted = reduced(rows, op.get("reduce", "none"))
            # Residuals reach thousands in a few outlier units, so small ones carry their rounding.
            scale = wanted.abs().amax(dim=-1, keepdim=True).clamp_min(1.0)
            if op["op"] == "probe":
                result = reply.result(op["name"])
                assert isinstance(result, CollectedProbe)
                got = torch.tensor(result.points[point]).unsqueeze(-1)
            else:
                got = reply.tensor(op["name"], point)
            torch.testing.assert_close(got / scale, wanted / scale, rtol=1e-3, atol=1e-4, msg=point)


@pytest.mark.parametrize("case", CASES)
def test_a_request_reads_and_does_what_transformers_does(engine: Engine, twin: Twin, case: str) -> None:
    ((reply,),) = engine.run([ask(case, 1)])
    check(engine, twin, case, reply)


def test_so_it_is_at_generated_positions_in_a_batch_of_all(engine: Engine, twin: Twin) -> None:
    replies = [reply for (reply,) in engine.run([ask(case, 5) for case in CASES])]
    for case, reply in zip(CASES, replies, strict=True):
        check(engine, twin, case, reply)


def test_a_narrower_dtype_is_the_rows_rounded(engine: Engine) -> None:
    reads = [capture(AT, "rows"), capture(AT, "half", dtype="bfloat16")]
    reply = engine.ask(PROMPT, reads, max_tokens=2)
    assert torch.equal(reply.tensor("half", AT), reply.tensor("rows", AT).bfloat16().float())


def test_patching_a_clean_runs_activations_reproduces_its_next_token(engine: Engine) -> None:
    clean, corrupted = "The capital of France is the city of", "The capital of Italy is the city of"
    assert len(engine.token_ids(clean)) == len(engine.token_ids(corrupted))
    point = "layers.8.output"
    source = engine.ask(clean, [capture(point, "c")], max_tokens=1)
    values = source.tensor("c", point)
    where = {"positions": list(range(len(values)))}
    plain = engine.ask(corrupted, max_tokens=1)
    patch = {"op": "patch", "at": point, "values": values.tolist(), "where": where}
    patched = engine.ask(corrupted, [patch], max_tokens=1)
    assert plain.token_ids != source.token_ids
    assert patched.token_ids == source.token_ids


def test_logits_can_be_steered_and_samples_read(engine: Engine) -> None:
    wanted = engine.tokenizer.encode(" Rome", add_special_tokens=False)[0]
    bias = [0.0] * engine.spec.vocab_size
    bias[wanted] = 100.0
    add = {"op": "steer", "at": "logits", "vector": bias, "where": {"positions": [-1]}}
    reply = engine.ask(PROMPT, [add, capture("samples", "s")], max_tokens=3)
    assert reply.token_ids[0] == wanted
    assert reply.tensor("s", "samples").tolist() == reply.token_ids
