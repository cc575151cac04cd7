"""The examples that run a model in this process give the described results, on the bundled model."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Final

import pytest
import torch

from examples import (
    ablate_refusal,
    activation_patching,
    attribution_patching,
    causal_tracing,
    induction_heads,
    logit_lens,
    sae_features,
    train_probe,
)
from nnsight_engine import LanguageModel, save
from tests.e2e.server import PROJECT

pytestmark = [pytest.mark.e2e, pytest.mark.heavy]

NUM_LAYERS: Final = 30
LAST: Final = NUM_LAYERS - 1
DRAWING: Final = (
    activation_patching, attribution_patching, causal_tracing, induction_heads, logit_lens, train_probe,
)  # fmt: skip


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return logit_lens.load(None)


Run = Callable[..., str]


@pytest.fixture
def run(model: LanguageModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs an example as from a command line, on the shared model, and returns what it prints."""
    monkeypatch.setenv("COLUMNS", "160")

    def run(example: ModuleType, *arguments: str) -> str:
        monkeypatch.setattr(example, "load", lambda source: model)
        example.main(arguments)
        return capsys.readouterr().out

    return run


def named(value: object) -> str | None:
    return value.__name__.rpartition(".")[2] if isinstance(value, ModuleType) else None


# What all have in common.


@pytest.mark.parametrize("example", DRAWING, ids=named)
def test_missing_matplotlib_is_reported_before_the_work(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(example, "load", lambda source: pytest.fail("it was loaded"))
    with pytest.raises(SystemExit):
        example.main(["--save", "picture.png"])
    assert "pip install 'nnsight-engine[viz]'" in capsys.readouterr().err


LONGER: Final = ("--clean", "The capital of the US is")
SAME: Final = ("--corrupted", activation_patching.CLEAN)
TWICE: Final = "the two answers must be different, got ' Paris' twice"
NO_PART: Final = "the subject must be a part of the prompt"


@pytest.mark.parametrize(
    ("example", "arguments", "sentence"),
    [
        (ablate_refusal, ("--layer", "99"), "--layer must be between -30 and 29, got 99"),
        (ablate_refusal, ("--max-tokens", "0"), "must be 1 or more, got 0"),
        (activation_patching, LONGER, "must have the same number of tokens, got 6 and 5"),
        (activation_patching, SAME, "must be larger after the first prompt"),
        (activation_patching, ("--answer", ""), "an answer must be one token, '' is 0"),
        (activation_patching, ("--other", " Paris"), TWICE),
        (attribution_patching, LONGER, "must have the same number of tokens, got 6 and 5"),
        (attribution_patching, SAME, "the two prompts must be different"),
        (attribution_patching, ("--answer", " Paris, France"), "an answer must be one token"),
        (attribution_patching, ("--other", " Paris"), TWICE),
        (causal_tracing, ("--prompt", "The capital of France is"), NO_PART),
        (causal_tracing, ("--answer", ""), "the answer must be one token, '' is 0"),
        (causal_tracing, ("--answer", " Tokyo", "--samples", "1"), "take an answer that the model gives"),
        (induction_heads, ("--length", "1"), "--length must be 2 or more, got 1"),
        (induction_heads, ("--heads", "999", "--length", "2", "--rows", "1"), "--heads must be at most 270"),
        (sae_features, ("--layer", "99"), "--layer must be between -30 and 29, got 99"),
    ],
    ids=lambda value: named(value) or (" ".join(value[:2]) if isinstance(value, tuple) else ""),
)
def test_errors_are_reported_in_a_sentence(
    run: Run,
    capsys: pytest.CaptureFixture[str],
    example: ModuleType,
    arguments: Sequence[str],
    sentence: str,
) -> None:
    with pytest.raises(SystemExit):
        run(example, *arguments)
    assert sentence in capsys.readouterr().err


# The logit lens.


@pytest.fixture(scope="module")
def lens(model: LanguageModel) -> torch.Tensor:
    return logit_lens.read_lens(model, logit_lens.PROMPT)


def test_the_last_row_of_the_lens_is_what_the_model_says(model: LanguageModel, lens: torch.Tensor) -> None:
    with torch.no_grad(), model.trace(logit_lens.PROMPT):
        said = save(model.lm_head.output[0].log_softmax(-1))
    assert lens.shape == (NUM_LAYERS, *said.shape)
    torch.testing.assert_close(lens[-1], said)


def test_the_answer_comes_up_in_the_upper_half_and_stays(model: LanguageModel, lens: torch.Tensor) -> None:
    rows = logit_lens.rows_of(model, lens)
    assert [row.layer for row in rows] == list(range(NUM_LAYERS))
    assert (rows[-1].token, rows[-1].rank) == (" Paris", 1)
    settled = logit_lens.settles_at(rows)
    assert NUM_LAYERS // 2 < settled < NUM_LAYERS
    assert all(row.token == " Paris" for row in rows[settled:])
    assert all(row.rank > 100 for row in rows[: NUM_LAYERS // 2])


def test_the_lens_is_printed_and_drawn(run: Run, tmp_path: Path) -> None:
    shown = run(logit_lens, "--save", str(tmp_path / "lens.png"))
    assert "' Paris' is first from layer" in shown
    assert is_png(tmp_path / "lens.png")


# Causal tracing.


@pytest.fixture(scope="module")
def case(model: LanguageModel) -> causal_tracing.Case:
    prompt, subject, answer = causal_tracing.PROMPT, causal_tracing.SUBJECT, causal_tracing.ANSWER
    return causal_tracing.prepare(model, prompt, subject, answer, samples=2)


def test_noise_on_the_subject_takes_the_answer_away(case: causal_tracing.Case) -> None:
    assert "".join(case.tokens[case.subject]).strip() == causal_tracing.SUBJECT
    assert case.clean > 0.5
    assert case.corrupted < case.clean / 2


def test_the_subject_brings_it_back_below_and_the_last_token_above(
    model: LanguageModel, case: causal_tracing.Case
) -> None:
    low, high = causal_tracing.trace_map(model, case, [0, LAST])
    strongest = int(low.argmax())
    assert case.subject.start <= strongest < case.subject.stop
    assert low[strongest] > 0.5
    assert low[-1].abs() < 0.1
    # At the very end the last token's state is all that the answer is read from.
    torch.testing.assert_close(high[-1], torch.tensor(1.0), atol=1e-3, rtol=0)
    assert high[:-1].abs().max() < 1e-3
    # What stands before the subject was never changed, so putting it back does nothing.
    assert low[: case.subject.start].abs().max() < 1e-3


def test_causal_tracing_is_printed_and_drawn(run: Run, tmp_path: Path) -> None:
    shown = run(causal_tracing, "--samples", "1", "--every", "15", "--save", str(tmp_path / "trace.png"))
    assert "with noise" in shown
    assert "iffel" in shown
    assert is_png(tmp_path / "trace.png")


# Activation patching.


@pytest.fixture(scope="module")
def pair(model: LanguageModel) -> activation_patching.Pair:
    example = activation_patching
    return example.align(model, example.CLEAN, example.CORRUPTED, example.ANSWER, example.OTHER)


def test_the_difference_moves_from_its_word_to_the_last_token(
    model: LanguageModel, pair: activation_patching.Pair
) -> None:
    word = pair.tokens.index(" France")
    assert pair.clean_difference > 0 > pair.corrupted_difference
    low, high = activation_patching.patch_map(model, pair, [0, LAST])
    assert low[word] > 0.9
    assert low[-1].abs() < 0.1
    torch.testing.assert_close(high[-1], torch.tensor(1.0), atol=1e-3, rtol=0)
    assert high[:-1].abs().max() < 1e-3
    # Both prompts are the same up to that word.
    assert low[:word].abs().max() < 1e-3


def test_activation_patching_is_printed_and_drawn(run: Run, tmp_path: Path) -> None:
    shown = run(activation_patching, "--every", "15", "--save", str(tmp_path / "patch.png"))
    assert [line.split("│")[1].strip() for line in shown.splitlines() if line.startswith("│")] == [
        "0", "15", "29"
    ]  # fmt: skip
    assert is_png(tmp_path / "patch.png")


# Attribution patching.


def test_the_gradients_estimate_agrees_with_real_patches(model: LanguageModel) -> None:
    example = attribution_patching
    answers = example.token_id(model, example.ANSWER), example.token_id(model, example.OTHER)
    found = example.attribute(model, example.CLEAN, example.CORRUPTED, answers)
    num_heads = found.estimates.shape[1]
    strongest, head = divmod(int(found.estimates.abs().argmax()), num_heads)
    layers = sorted({*range(2, NUM_LAYERS, 5), strongest})
    effects = example.patch_layers(model, example.CORRUPTED, answers, found, layers)
    assert example.agreement(found.estimates[layers], effects) > 0.9
    # The head that it singles out is the one that matters most of those that were patched.
    assert divmod(int(effects.abs().argmax()), num_heads) == (layers.index(strongest), head)
    # Parameters are left alone: their gradients would be as large as the model.
    assert all(parameter.grad is None for parameter in model.parameters())


def test_attribution_patching_is_printed_and_drawn(run: Run, tmp_path: Path) -> None:
    shown = run(attribution_patching, "--check", "29", "--save", str(tmp_path / "heads.png"))
    assert "Correlation over 18 heads" in shown  # of the first and the last layer, not of those singled out
    assert is_png(tmp_path / "heads.png")


# Induction heads.


def test_few_heads_do_it_and_without_them_the_repetition_is_not_seen(model: LanguageModel) -> None:
    tokens = induction_heads.repeated_tokens(model, length=20, rows=3)
    assert torch.equal(tokens[:, :20], tokens[:, 20:])
    scores = induction_heads.induction_scores(induction_heads.read_patterns(model, tokens))
    found = induction_heads.highest(scores, 10)
    assert scores.max() > 0.5
    assert scores.max() > 5 * scores.mean()
    others = induction_heads.others(scores, found)
    assert len(others) == len(found)
    assert not set(others) & set(found)
    whole, without, control = (
        induction_heads.log_probability(model, tokens, silenced) for silenced in ((), found, others)
    )
    assert whole - without > 2
    assert whole - control < (whole - without) / 2


def test_induction_heads_are_printed_and_drawn(run: Run, tmp_path: Path) -> None:
    shown = run(induction_heads, "--length", "12", "--rows", "2", "--save", str(tmp_path / "head.png"))
    assert "without these 10" in shown
    assert "without 10 others" in shown
    assert is_png(tmp_path / "head.png")


# The direction of harmful requests.


@pytest.fixture(scope="module")
def direction(model: LanguageModel) -> torch.Tensor:
    example = ablate_refusal
    return example.find_direction(model, example.HARMFUL, example.HARMLESS, NUM_LAYERS // 2)


def test_the_direction_separates_held_out_requests(model: LanguageModel, direction: torch.Tensor) -> None:
    harmful, harmless = (
        ablate_refusal.last_states(model, requests, NUM_LAYERS // 2) @ direction
        for requests in (ablate_refusal.HELD_OUT_HARMFUL, ablate_refusal.HELD_OUT_HARMLESS)
    )
    assert harmful.min() > harmless.max()


def test_it_is_taken_out_of_the_stream_all_the_way_through(
    model: LanguageModel, direction: torch.Tensor
) -> None:
    chat = ablate_refusal.as_chat(model, "Hello")
    with torch.no_grad(), model.trace() as tracer:
        with tracer.invoke(chat):
            ablate_refusal.ablate(model, direction, 3)
        with tracer.invoke():  # sees what the first leaves
            streams = save([])
            for layer in range(3):
                stream = model.layers[layer].input[0]
                streams.extend([stream, stream + model.points[f"layers.{layer}.attn.output"][0]])
            streams.append(model.layers[2].output[0])
            tracer.stop()
    assert (torch.stack(streams) @ direction).abs().max() < 1e-3


def test_a_model_without_a_chat_template_is_refused(
    run: Run, model: LanguageModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(model.tokenizer, "chat_template", None)
    with pytest.raises(SystemExit):
        run(ablate_refusal)
    assert "no chat template" in capsys.readouterr().err


def test_ablation_is_printed(run: Run) -> None:
    shown = run(ablate_refusal, "--max-tokens", "2", "--layer", "-15")
    assert "layers.15.output" in shown
    assert "Refusals of 4:" in shown


# Probes.


def test_a_probe_reads_held_out_sentences_and_one_of_shuffled_labels_does_not(model: LanguageModel) -> None:
    example = train_probe
    learnt = example.make_examples(example.THINGS, example.PRAISE, example.COMPLAINT)
    held_out = example.make_examples(
        example.HELD_OUT_THINGS, example.HELD_OUT_PRAISE, example.HELD_OUT_COMPLAINT
    )
    assert not set(learnt.sentences) & set(held_out.sentences)
    states, unseen = (example.read_activations(model, one.sentences) for one in (learnt, held_out))
    assert states.shape == (NUM_LAYERS, len(learnt.sentences), 576)
    accuracy = example.train(states, learnt.labels, steps=60).accuracy(unseen, held_out.labels)
    assert accuracy[NUM_LAYERS // 2 :].min() > 0.8
    chance = example.shuffled_accuracy(states, learnt, unseen, held_out, shuffles=4, steps=60)
    assert 0.3 < chance.mean() < 0.7


def test_probes_are_printed_and_drawn(run: Run, tmp_path: Path) -> None:
    shown = run(train_probe, "--steps", "5", "--shuffles", "1", "--save", str(tmp_path / "probe.png"))
    assert is_png(tmp_path / "probe.png")
    assert "Accuracy on 32 held-out sentences" in shown
    assert sum(line.startswith("│") for line in shown.splitlines()) == NUM_LAYERS


# A sparse autoencoder.


def test_features_of_topics_are_found_and_turned_up(model: LanguageModel) -> None:
    example, layer = sae_features, 8
    states, unseen = (
        {
            topic: example.read_states(model, example.sentences(topic, patterns), layer)
            for topic in example.TOPICS
        }
        for patterns in (example.PATTERNS, [example.HELD_OUT])
    )
    sae = example.train(torch.cat(list(states.values())))
    assert example.explained(sae, torch.cat(list(unseen.values()))) > 0.3
    assert int((sae.encode(unseen["sea"]) > 0).sum(-1).max()) <= sae.active
    gains = []
    for topic in example.TOPICS:
        feature = example.topic_feature(sae, states, topic)
        means = {name: float(sae.encode(value)[:, feature].mean()) for name, value in unseen.items()}
        assert max(means, key=means.__getitem__) == topic
        value = 2 * float(sae.encode(states[topic])[:, feature].max())
        before, after = (
            example.word_chances(model, sae, layer, feature, strength) for strength in (None, value)
        )
        gains.append(after[topic] - before[topic])
    assert sum(gains) / len(gains) > 0.5
    feature = example.topic_feature(sae, states, "sea")
    value = 2 * float(sae.encode(states["sea"])[:, feature].max())
    plain, steered = (
        example.write(model, sae, layer, feature, value=strength, max_tokens=8) for strength in (None, value)
    )
    assert plain
    assert plain != steered


def test_features_are_printed(run: Run) -> None:
    shown = run(sae_features, "--layer", "2", "--steps", "10", "--topic", "money", "--max-tokens", "4")
    assert "chosen for money" in shown
    assert "steered:" in shown


def is_png(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG")


def test_without_pictures_matplotlib_is_not_needed() -> None:
    names = sorted(path.stem for path in (PROJECT / "examples").glob("*.py"))
    code = f"import sys; sys.modules['matplotlib'] = None; from examples import {', '.join(names)}"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
