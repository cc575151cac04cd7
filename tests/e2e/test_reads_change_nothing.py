"""Whatever is read, in whatever dtype, the model goes on as if nobody had looked.

Each test reads alone over an empty prefix cache, which it fills, and asks plainly behind that. Tokens and
log-probabilities are those of plain requests, bit by bit; meanwhile ``watching`` compares every tensor.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from nnsight_engine import save
from nnsight_engine.vllm_backend.vllm import VLLM
from tests.e2e.harness import Engine, Reply, random_vector
from tests.e2e.traces import traced_engine
from tests.e2e.watching import Watch
from tests.narrow_model import WIDTH

pytestmark = [pytest.mark.e2e, pytest.mark.heavy]

PROMPT: Final = [(7 * number) % 500 + 20 for number in range(150)]
"""Longer than a block of the prefix cache, whose keys and values others take over."""

SAMPLING: Final = {"logprobs": 5}
DTYPES: Final = ("float32", "bfloat16", "float16")
WHERES: Final[tuple[dict[str, Any], ...]] = ({"range": [3, 9]}, {"positions": [0, 2, 5, 149]}, {})
STREAM: Final = ["embed.output", "layers.*.output", "norm.output"]
INPUTS: Final = ["layers.*.input"]
INSIDE: Final = ["attn.output", "attn.q", "attn.k", "attn.v", "attn.heads"]
MLP: Final = ["mlp.input", "mlp.output", "mlp.gate", "mlp.up", "mlp.act"]
HOOKED: Final = [f"layers.3.{leaf}" for leaf in (*INSIDE, *MLP)]


class Served:
    """An engine, and what plain requests get of it."""

    def __init__(self, model: VLLM) -> None:
        self.model = model
        self.engine = Engine.around(model.engine)
        self.fresh = self.forgotten().plain()
        self.cached = self.plain()
        assert self.cached.num_cached_tokens

    def forgotten(self) -> Served:
        assert self.model.engine.reset_prefix_cache()
        return self

    def plain(self) -> Reply:
        return self.engine.ask(PROMPT, max_tokens=4, sampling=SAMPLING)

    def reads(self, interventions: list[dict[str, Any]]) -> Reply:
        return self.forgotten().engine.ask(PROMPT, interventions, max_tokens=4, sampling=SAMPLING)

    def check(self, reply: Reply) -> None:
        """Make sure that a reader, and who comes behind it, got what they get when nobody reads."""
        assert reply.failure is None
        _same(reply, self.fresh)
        behind = self.plain()
        assert behind.num_cached_tokens == self.cached.num_cached_tokens
        _same(behind, self.cached)


def _same(reply: Reply, expected: Reply) -> None:
    assert reply.token_ids == expected.token_ids
    assert reply.logprobs == expected.logprobs


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def served(request: pytest.FixtureRequest, narrow: Path) -> Iterator[Served]:
    options = {"max_num_batched_tokens": 1024, "enable_prefix_caching": True}
    with traced_engine(narrow, dtype=request.param, **options) as model:
        yield Served(model)


@pytest.mark.parametrize("reduce", ["none", "last", "mean"])
def test_captures(served: Served, watch: Watch, reduce: str) -> None:
    before = watch.num_compared
    points = (STREAM, INPUTS, HOOKED, ["logits"])
    for where in WHERES:
        fields: dict[str, Any] = {"op": "capture", "reduce": reduce} | ({"where": where} if where else {})
        cases = itertools.product(points, DTYPES)
        served.check(served.reads([fields | {"at": at, "dtype": dtype} for at, dtype in cases]))
    assert watch.num_compared > before


@pytest.mark.parametrize("where", WHERES)
def test_probes_lenses_and_patterns(served: Served, watch: Watch, where: dict[str, Any]) -> None:
    before = watch.num_compared
    fields = {"where": where} if where else {}
    patterns = [
        {"op": "capture", "at": ["layers.3.attn.pattern", "layers.4.attn.pattern"], "dtype": dtype, **fields}
        for dtype in DTYPES
    ]
    for ops in (
        [{"op": "probe", "at": "layers.*.output", "weights": random_vector(1), **fields}],
        [{"op": "logit_lens", "layers": "*", "top_k": 3, "targets": [5], **fields}],
        patterns,
    ):
        served.check(served.reads(ops))
    assert watch.num_compared > before


def test_traces(served: Served, watch: Watch) -> None:
    model = served.forgotten().model
    before = watch.num_compared
    with model.trace(PROMPT, max_tokens=4, temperature=0.0, ignore_eos=True, logprobs=5) as tracer:
        own = save(model.model.layers[3].output)
        stream = save(model.layers[4].output)
        narrow = save(model.layers[5].output.to(torch.float16))
        pattern = save(model.layers[6].attn.pattern)
        cache = tracer.cache(modules=[model.model.layers[7]])
        logits = save(model.logits.output)
        answer = save(tracer.result)
    assert own[0].shape == own[1].shape == stream.shape == narrow.shape == (len(PROMPT), WIDTH)
    assert pattern.shape[-1] == len(PROMPT)
    assert logits.shape[-1] == served.engine.spec.vocab_size
    assert len(cache)
    assert list(answer.outputs[0].token_ids) == served.fresh.token_ids
    _same(served.plain(), served.cached)
    assert watch.num_compared > before


def test_modules_that_a_block_applies_leave_its_values(served: Served) -> None:
    # vLLM's norms add the residual in place, and its rotary embedding turns in place.
    model = served.forgotten().model
    with model.trace(PROMPT, max_tokens=4, temperature=0.0, ignore_eos=True, logprobs=5) as tracer:
        qkv = model.model.layers[3].self_attn.qkv_proj.output[0]
        query, key = qkv[:, :WIDTH], qkv[:, WIDTH : WIDTH + WIDTH // 2]
        positions = torch.arange(len(PROMPT))
        turned = save(model.model.layers[3].self_attn.rotary_emb(positions, query, key))
        unturned = save(query.clone())
        hidden, residual = model.model.layers[3].output
        normed = save(model.model.norm(hidden, residual))
        kept = save(hidden.clone())
        again = save(model.model.layers[3].output[0])
        answer = save(tracer.result)
    assert not torch.equal(turned[0], unturned)
    assert not torch.equal(normed[0], kept)
    assert torch.equal(kept, again)
    assert list(answer.outputs[0].token_ids) == served.fresh.token_ids
    _same(served.plain(), served.cached)
