"""The parts of the example of a sparse autoencoder that need no server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import pytest
import torch

from examples.sae_on_server.autoencoder import SparseAutoencoder, quality, train, write
from examples.sae_on_server.corpus import Corpus
from examples.sae_on_server.labels import TOP, label, label_features, top_contexts, topic_feature
from nnsight_engine.features.saelens import point_of, read_config
from nnsight_engine.features.weights_file import check_weights, load_dictionary

WIDTH: Final = 12
NUM_FEATURES: Final = 32
K: Final = 4


@pytest.fixture
def states() -> torch.Tensor:
    """Sums of few out of twenty directions, beside a mean that is much longer, as in a residual stream."""
    chance = torch.Generator().manual_seed(0)
    directions = torch.nn.functional.normalize(torch.randn(20, WIDTH, generator=chance), dim=1)
    amounts = torch.rand(2000, 20, generator=chance) * 10 + 5
    chosen = torch.rand(2000, 20, generator=chance).argsort(1) < 3
    return (amounts * chosen) @ directions + 40 * torch.randn(WIDTH, generator=chance)


def corpus_of(texts: dict[str, list[str]]) -> Corpus:
    """Return a corpus of texts by topic, each a list of words."""
    tokens: list[str] = []
    numbers: list[int] = []
    topics: list[str] = []
    for topic, listed in texts.items():
        for text in listed:
            words = [f" {word}" if word[0].isalnum() else word for word in text.split(" ")]
            words = [" " if word == "_" else word for word in words]
            tokens += words
            numbers += [len(topics)] * len(words)
            topics.append(topic)
    return Corpus(torch.zeros(len(tokens), 1), tokens, numbers, topics)


def test_trained_it_rebuilds_states_that_it_has_not_seen_by_few_features(states: torch.Tensor) -> None:
    sae, losses = train(states[:1500], num_features=NUM_FEATURES, k=K, steps=300, batch=128)
    found = quality(sae, states[1500:])
    untrained = quality(SparseAutoencoder(states[:1500], NUM_FEATURES, K), states[1500:])
    assert found.explained > 0.8 > untrained.explained
    assert losses[-1] < losses[0]
    assert 0 < found.active <= K
    assert 0.5 < found.alive <= 1


def test_the_server_computes_the_same_features_from_the_written_files(
    states: torch.Tensor, tmp_path: Path
) -> None:
    sae, _ = train(states, num_features=NUM_FEATURES, k=K, steps=20, batch=64)
    write(sae, tmp_path, 5, "a model")
    read = read_config(json.loads((tmp_path / "cfg.json").read_text()))
    assert point_of(read.hook, "LlamaForCausalLM") == "layers.5.output"
    weights = tmp_path / "sae_weights.safetensors"
    assert check_weights(weights, read.config) == "float16"
    stored = load_dictionary(weights, read.config)
    rounded = SparseAutoencoder(states, NUM_FEATURES, K)
    rounded.load_state_dict({name: one.half().float() for name, one in sae.state_dict().items()})
    torch.testing.assert_close(stored.encode(states), rounded.encode(states), atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(stored.decode(stored.encode(states)), rounded(states), atol=1e-2, rtol=1e-3)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([str(number) for number in range(TOP)], "numbers: 0, 1, 2"),
        ([","] * TOP, "commas: ,"),
        (["\n", "\n\n"] * (TOP // 2), "line breaks: '\\n, \\n\\n'"),
        (["_"] * TOP, "blanks"),
        (["."] * (TOP - 2) + ["!", "so"], "ends of sentences: ., !, so"),
        (["And"] * TOP, "the word “and”"),
        (["ship", "sail"] * (TOP // 2), "sea: ship, sail"),
        (["ship", "sail"] * (TOP // 2 - 1), None),
    ],
)
def test_a_label_says_what_most_contexts_have_in_common(words: list[str], expected: str | None) -> None:
    corpus = corpus_of({"sea": words})
    assert label(corpus, range(len(words))) == expected


def test_features_get_labels_by_their_own_contexts() -> None:
    corpus = corpus_of({"sea": ["ship"] * 15 + ["sail"] * 15, "law": ["judge"] * 30})
    active = torch.zeros(60, 4)
    active[:30, 0] = torch.linspace(1, 2, 30)  # the sea's texts
    active[30:, 1] = 1.0  # one word
    active[30:55, 2] = 1.0  # the same word again, less often
    active[3, 3] = 1.0  # one token
    labels = label_features(corpus, active)
    assert labels[1] == "the word “judge”"
    assert set(labels) == {0, 1}
    assert labels[0] == "sea: sail, ship"
    assert top_contexts(active, 0)[:2] == [29, 28]
    assert top_contexts(active, 3) == [3]
    assert topic_feature(corpus, active, "sea", {}) == 0
    assert topic_feature(corpus, active, "law", {}) == 1
    assert topic_feature(corpus, active, "law", {2: "law: judge", 0: "sea: sail"}) == 2
