"""Features on the real model in float32: random requests against a reference on values that they capture."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from api_schemas.dictionaries import DictionaryUsed, NamedDictionary
from nnsight_engine.features.config import Architecture, DictionaryConfig, Normalization, StoredDictionary
from nnsight_engine.features.dictionary import Dictionary
from nnsight_engine.plans.collect.results import CollectedFeatures, CollectedMarks
from tests.e2e.engine_kinds import DEFAULT, kind_of_process
from tests.e2e.harness import Ask, Engine, Reply
from tests.narrow_model import WIDTH
from tests.unit.features.reference import Reference, some_tensors

pytestmark = pytest.mark.e2e

NUM_FEATURES: Final = 96
HAS_CONDITIONS: Final = (kind_of_process() or DEFAULT).num_stages == 1
PROMPTS: Final = (
    "The Eiffel Tower is in the city of",
    "I think this movie is wonderful, and",
    "Once upon a time there was a king who had no crown, and he asked the people of the town for",
)
KINDS: Final[dict[str, tuple[Architecture, Normalization, str, str]]] = {
    "standard": (Architecture.STANDARD, Normalization.NONE, "layers.4.output", "layers.4.output"),
    "topk": (Architecture.TOPK, Normalization.LAYER_NORM, "layers.9.output", "layers.9.output"),
    "gated": (Architecture.GATED, Normalization.CONSTANT_NORM, "layers.9.output", "layers.9.output"),
    "jumprelu": (Architecture.JUMPRELU, Normalization.NONE, "layers.20.output", "layers.20.output"),
    "transcoder": (
        Architecture.SKIP_TRANSCODER,
        Normalization.NONE,
        "layers.14.mlp.input",
        "layers.14.mlp.output",
    ),
}


class Known:
    """A random dictionary, as it is stored, and its definition."""

    def __init__(self, name: str, folder: Path) -> None:
        architecture, normalization, self.at, self.output_at = KINDS[name]
        config = DictionaryConfig(
            architecture,
            WIDTH,
            NUM_FEATURES,
            WIDTH,
            normalization,
            subtracts_decoder_bias=name == "standard",
            k=8 if architecture is Architecture.TOPK else None,
        )
        tensors = some_tensors(np.random.default_rng(len(name)), config)
        tensors = {key: (one / (24 if one.ndim > 1 else 4)).contiguous() for key, one in tensors.items()}
        path = folder / f"{name}.safetensors"
        save_file(tensors, path)
        stored = StoredDictionary(config, self.at, self.output_at, name, str(path), "float32")
        self.named = NamedDictionary.of(DictionaryUsed(name=name, version=1, id=name), stored, None)
        self.plain = Reference(Dictionary(config, tensors))


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Known]:
    folder = tmp_path_factory.mktemp("dictionaries")
    return {name: Known(name, folder) for name in KINDS}


@pytest.fixture
def engine(chunked_engine: Engine) -> Engine:
    return chunked_engine


class RandomRequest:
    """A request that reads and changes features, and captures all values on which they depend."""

    def __init__(self, rng: random.Random, known: dict[str, Known]) -> None:
        self.max_tokens = rng.randint(6, 20)
        self.prompt = rng.choice(PROMPTS)
        self.read = known[rng.choice(list(known))]
        self.given, self.top_k = rng.sample(range(NUM_FEATURES), 3), rng.randint(1, 12)
        self.written = known[rng.choice(list(known))]
        self.changes = [self._change(rng, one) for one in rng.sample(range(NUM_FEATURES), rng.randint(1, 4))]
        self.tested = known["standard"]
        self.feature = rng.randrange(NUM_FEATURES)
        self.is_conditional = HAS_CONDITIONS and rng.random() < 0.5

    def _change(self, rng: random.Random, feature: int) -> dict[str, Any]:
        mode = rng.choice(["set", "add", "scale", "ablate"])
        change: dict[str, Any] = {"feature": feature, "mode": mode}
        return change if mode == "ablate" else change | {"value": rng.uniform(0, 4)}

    def ask(self) -> Ask:
        when = {"dictionary": self.tested.named, "feature": self.feature}
        flag = {"op": "flag", "when": when, "name": "flag"}
        write = {"op": "feature", "dictionary": self.written.named, "changes": self.changes}
        if self.is_conditional:
            write["when"] = when
        points = [self.written.at, self.written.output_at]
        return Ask(
            self.prompt,
            [
                {"op": "capture", "at": sorted({*points}), "name": "before"},
                {"op": "capture", "at": self.tested.at, "name": "tested"},
                *([flag] if HAS_CONDITIONS else []),
                write,
                {"op": "capture", "at": self.written.output_at, "name": "after"},
                {"op": "capture", "at": self.read.at, "name": "read"},
                {"op": "features", "dictionary": self.read.named, "features": self.given, "name": "given"},
                {"op": "features", "dictionary": self.read.named, "top_k": self.top_k, "name": "top"},
            ],
            max_tokens=self.max_tokens,
            sampling={"ignore_eos": True},
        )

    def check(self, reply: Reply) -> None:
        assert reply.collected is not None, reply.failure
        read = reply.tensor("read", self.read.at).double().numpy()
        given, top = reply.result("given"), reply.result("top")
        assert isinstance(given, CollectedFeatures)
        assert isinstance(top, CollectedFeatures)
        for x, some, best in zip(read, given.rows(), top.rows(), strict=True):
            activations = self.read.plain.encode(x)
            assert [feature for feature, _ in some] == self.given
            strongest = sorted(activations[activations > 0], reverse=True)[: self.top_k]
            _assert_close([value for _, value in best], strongest)
            _assert_close([value for _, value in (*some, *best)], [activations[i] for i, _ in (*some, *best)])
        tested = reply.tensor("tested", self.tested.at).double().numpy()
        held = [self.tested.plain.encode(x)[self.feature] > 0 for x in tested]
        if HAS_CONDITIONS:
            flag = reply.result("flag")
            assert isinstance(flag, CollectedMarks)
            assert flag.positions == [position for position, holds in enumerate(held) if holds]
        self._check_write(reply, held)

    def _check_write(self, reply: Reply, held: list[bool]) -> None:
        # Layer 4 is not behind its own test.
        positions = [index for index, holds in enumerate(held) if holds or not self.is_conditional]
        assert reply.collected is not None
        assert reply.collected.applied[2 + HAS_CONDITIONS].positions == positions
        inputs = reply.tensor("before", self.written.at).double().numpy()
        before = reply.tensor("before", self.written.output_at)
        expected = before.double().numpy().copy()
        for position in positions:
            x = inputs[position]
            old = self.written.plain.encode(x)
            for change in self.changes:
                a, v = old[change["feature"]], change.get("value", 0.0)
                new = {"set": v, "add": a + v, "scale": a * v, "ablate": 0.0}[change["mode"]]
                expected[position] += (new - a) * self.written.plain.direction(change["feature"], x)
        after = reply.tensor("after", self.written.output_at)
        torch.testing.assert_close(after, torch.from_numpy(expected).float(), rtol=1e-3, atol=2e-2)
        untouched = [index for index in range(len(held)) if index not in positions]
        assert torch.equal(after[untouched], before[untouched])


def _assert_close(found: list[float], expected: list[float]) -> None:
    np.testing.assert_allclose(found, expected, rtol=2e-3, atol=2e-2)


@pytest.mark.parametrize("seed", range(3))
def test_random_features_are_those_of_a_reference(engine: Engine, known: dict[str, Known], seed: int) -> None:
    rng = random.Random(seed)
    requests = [RandomRequest(rng, known) for _ in range(8)]
    replies = engine.run([request.ask() for request in requests])
    for request, (reply,) in zip(requests, replies, strict=True):
        request.check(reply)


def test_choices_have_features_of_their_own(engine: Engine, known: dict[str, Known]) -> None:
    dictionary = known["gated"]
    read = {"op": "features", "dictionary": dictionary.named, "features": [5], "name": "f"}
    capture = {"op": "capture", "at": dictionary.at, "name": "c"}
    sampling = {"n": 3, "temperature": 1.5, "seed": 1, "ignore_eos": True}
    (replies,) = engine.run([Ask(PROMPTS[1], [read, capture], max_tokens=10, sampling=sampling)])
    for reply in replies:
        found: Any = reply.result("f")
        x = reply.tensor("c", dictionary.at).double().numpy()
        _assert_close([row[0][1] for row in found.rows()], [dictionary.plain.encode(one)[5] for one in x])
    assert len({tuple(reply.token_ids) for reply in replies}) > 1
