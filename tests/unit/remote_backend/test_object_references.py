"""What both sides have of a model travels by name, and is the engine's own on arrival."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nnsight_engine.interleaving.shared_variables import Barrier
from nnsight_engine.modeling.language import LanguageModel
from nnsight_engine.remote_backend.values.object_references import ObjectReferences, reference_of
from nnsight_engine.serialization import EncodeError, decode, encode
from tests.families.checkpoints import write_checkpoint


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def client(path: Path) -> LanguageModel:
    return LanguageModel(path)


@pytest.fixture(scope="module")
def engine(path: Path) -> LanguageModel:
    return LanguageModel(path, dispatch=True)


def over(value: Any, client: LanguageModel, places: ObjectReferences) -> Any:
    barriers: list[Barrier] = []
    data = encode(value, reference=lambda one: reference_of(one, client, barriers))
    return decode(data, resolve=places)


def test_envoys_modules_and_weights_are_the_engines(client: LanguageModel, engine: LanguageModel) -> None:
    assert client.lm_head.weight.is_meta
    for name in ("", "model.layers.1.mlp", "generator.streamer"):
        sent = client.get(name) if name else client
        found = over(sent, client, ObjectReferences(engine))
        assert found is (engine.get(name) if name else engine)
        assert over(sent._module, client, ObjectReferences(engine)) is found._module
    assert over(client.lm_head.weight, client, ObjectReferences(engine)) is engine.lm_head.weight
    rotary = over(client.model.rotary_emb.inv_freq, client, ObjectReferences(engine))
    assert rotary is engine.model.rotary_emb.inv_freq
    assert over(client.tokenizer, client, ObjectReferences(engine)) is engine.tokenizer
    assert over(torch.ones(2), client, ObjectReferences(engine)).tolist() == [1, 1]


def test_another_model_s_envoy_is_refused(client: LanguageModel, path: Path) -> None:
    other = LanguageModel(path)
    for value in (other, other.points, other.model.layers[0].mlp.source):
        with pytest.raises(EncodeError, match="another model"):
            reference_of(value, client, [])


@pytest.mark.parametrize(
    "reference",
    [
        ("envoy", "model.nothing"), ("envoy",), ("envoy", "model", "x"), ("tensor", "lm_head.nothing"),
        ("module", "model.config"), ("operation", "model.model.layers.0.mlp", "nothing_0"), ("barrier", "0"),
        ("barrier", "0", "-1"), ("tracer",), ("what",), ("point", "layers.0", "x"),
    ],
)  # fmt: skip
def test_a_name_that_is_nothing_here_is_an_error_that_says_so(
    engine: LanguageModel, reference: tuple[str, ...]
) -> None:
    with pytest.raises(LookupError, match="this model lacks"):
        ObjectReferences(engine)(reference)
