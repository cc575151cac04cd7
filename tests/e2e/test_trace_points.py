"""Standard points in blocks on vLLM: the same names, and the same numbers, as on ``LanguageModel``.

Every family's points are compared by ``test_families``. The tests here share one engine, whose steps are so
short that longer prompts come in chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from nnsight_engine import LanguageModel, save
from nnsight_engine.envoys.architectures.named_points import PatternError, PointValueError, UnknownPointError
from nnsight_engine.interleaving.events import MissedProviderError
from nnsight_engine.vllm_backend.vllm import VLLM
from tests.e2e.point_blocks import OTHER, PROMPT
from tests.families.checkpoints import HIDDEN_SIZE, NUM_LAYERS, write_checkpoint

pytestmark = pytest.mark.e2e

LONG: Final = [*PROMPT, *OTHER, 7, 8, 9]
GREEDY: Final[dict[str, Any]] = {"temperature": 0.0, "ignore_eos": True}
_MAX_STEP: Final = 8


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def local(checkpoint: Path) -> LanguageModel:
    return LanguageModel(str(checkpoint), dtype=torch.float32, dispatch=True)


@pytest.fixture(scope="module")
def model(checkpoint: Path, local: LanguageModel) -> Iterator[VLLM]:
    """Start an engine in this process, after ``LanguageModel`` has been loaded."""
    model = VLLM(
        str(checkpoint),
        dtype="float32",
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=4,
        max_num_batched_tokens=_MAX_STEP,
        num_gpu_blocks_override=32,
    )
    yield model
    model.shutdown()


# Names on the client.


def test_the_client_knows_the_same_names(model: VLLM, local: LanguageModel) -> None:
    assert model.points() == local.points()
    assert len(model.layers) == NUM_LAYERS
    assert "layers.*.attn.heads (4, 32)" in repr(model.points)
    assert "LlamaDecoderLayer" in repr(model.layers[-1])
    assert [one.attn.path for one in model.layers[2:]] == [
        "model.model.layers.2.self_attn",
        "model.model.layers.3.self_attn",
    ]
    assert {"heads", "q", "qkv_proj"} <= set(dir(model.layers[0].attn))


def test_what_is_no_name_is_said(model: VLLM) -> None:
    with pytest.raises(IndexError):
        _ = model.layers[NUM_LAYERS]
    with pytest.raises(AttributeError, match="no_such"):
        _ = model.layers[0].attn.no_such
    with pytest.raises(UnknownPointError, match="layers\\.0\\.output"):
        _ = model.points["layers.9.output"]
    with pytest.raises(UnknownPointError):
        _ = model.points["layers.0.attn.input.nothing"]


def test_outside_a_trace_there_are_names_only(model: VLLM) -> None:
    with pytest.raises(ValueError, match="did not execute"):
        _ = model.layers[1].output
    with pytest.raises(ValueError, match=r"layers\.1\.attn\.q"):
        model.layers[1].attn.q = torch.zeros(1)


def test_names_taken_before_a_trace_are_places_within(model: VLLM) -> None:
    layer, attention, layers, points = model.layers[1], model.layers[2].attn, model.layers, model.points
    norm, embed, projection = model.norm, model.embed, model.model.layers[1].self_attn.qkv_proj
    with model.trace(PROMPT, **GREEDY):
        first = save(embed.output)
        fused = projection.output[0]
        outputs = save([layer.output, attention.heads])
        outputs += [layers[-1].output, norm.output]
        logits = save(points["logits"])
        width = save(fused.shape[-1])
    assert first.shape == (len(PROMPT), HIDDEN_SIZE)
    assert outputs[1].shape == (len(PROMPT), 4, 32)
    assert width == 256
    assert logits.shape == (1, 319)


# Values.


def test_an_edited_stream_takes_the_place_of_the_pair(model: VLLM) -> None:
    with model.trace(PROMPT, **GREEDY):
        stream = model.layers[1].output
        stream[0] = 7.0
        stream[1:] *= 2
        expected = stream.clone().save()
        hidden, residual = model.model.layers[1].output
        after = save([hidden, residual])
    assert torch.equal(after[0], expected)
    assert not after[1].any()


def test_parts_are_skipped(model: VLLM) -> None:
    zeros = torch.zeros(len(PROMPT), HIDDEN_SIZE)
    with model.trace(PROMPT, **GREEDY):
        model.layers[1].mlp.skip(zeros)
        skipped = model.logits.output.save()
    with model.trace(PROMPT, **GREEDY):
        model.layers[1].mlp.output = zeros
        written = model.logits.output.save()
    with model.trace(PROMPT, **GREEDY):
        hidden = model.layers[2].input
        model.layers[2].skip((hidden, zeros))
        after = model.layers[2].output.clone().save()
        before = save(hidden)
    torch.testing.assert_close(skipped, written)
    assert torch.equal(before, after)


def test_logits_and_samples_are_values(model: VLLM) -> None:
    place = model.logits
    with model.trace(PROMPT, max_tokens=2, **GREEDY) as tracer:
        first = save([model.logits.argmax(-1)])
        for _ in tracer.iter[:]:
            logits = model.logits.save()
            others = [model.logits.output, model.logits, place.output]
            same = save([logits.output is logits, *(torch.equal(one, logits) for one in others)])
            model.logits.output[:, 11] = 1e4
            tokens = model.samples.save()
    assert same == [True] * 4
    assert (type(logits), logits.shape, tokens.tolist()) == (torch.Tensor, (1, 319), [[11]])
    assert first[0].item() != 11
    forced = torch.nn.functional.one_hot(torch.tensor([12]), 319).float() * 100
    for written in ("logits", "logits.output", "samples", "samples.output"):
        with model.trace(PROMPT, max_tokens=1, **GREEDY) as tracer:
            if written == "logits":
                model.logits = forced
            elif written == "logits.output":
                model.logits.output = forced
            elif written == "samples":
                model.samples = torch.tensor([[12]])
            else:
                model.samples.output = torch.tensor([[12]])
            result = tracer.result.save()
        assert list(result.outputs[0].token_ids) == [12], written


def test_generation_is_a_trace_of_several_tokens(model: VLLM) -> None:
    tokens = []
    for trace in (
        model.generate(PROMPT, max_new_tokens=3, **GREEDY),
        model.trace(PROMPT, max_tokens=3, **GREEDY),
    ):
        with trace as tracer:
            result = tracer.result.save()
        tokens.append(list(result.outputs[0].token_ids))
    assert len(tokens[0]) == 3
    assert tokens[0] == tokens[1]
    with (
        pytest.raises(MissedProviderError, match=r"step 7 was not reached: .* after 3 steps"),
        model.generate(PROMPT, max_new_tokens=3, **GREEDY) as tracer,
    ):
        for _ in tracer.iter[7]:
            model.logits.save()


def test_places_are_not_saved(model: VLLM) -> None:
    for where in ("itself", "later"):
        with pytest.raises(TypeError, match=r"layers\[1\].*output.save"), model.trace(PROMPT, **GREEDY):
            found = save([] if where == "later" else model.layers[1])
            found.append(model.layers[1].mlp)
    with pytest.raises(ValueError, match=r"'model\.logits'"), model.trace(PROMPT, **GREEDY) as tracer:
        tracer.cache(modules=[model.logits])


@pytest.mark.parametrize("part", ["embed", "layers[1]", "layers[1].attn", "layers[1].mlp", "norm"])
def test_parts_move_on_to_the_next_step(model: VLLM, local: LanguageModel, part: str) -> None:
    found = []
    for engine, options in ((model, {"max_tokens": 3, **GREEDY}), (local, {"max_new_tokens": 3})):
        with engine.trace(PROMPT, **options):
            place: Any = engine
            for name in part.replace("[", ".").replace("]", "").split("."):
                place = place[int(name)] if name.isdecimal() else getattr(place, name)
            values = save([place.output])
            for _ in range(2):
                values.append(place.next().output)
        tensors = [value[0] if isinstance(value, tuple) else value for value in values]
        found.append([value.reshape(-1, HIDDEN_SIZE) for value in tensors])
    assert [len(value) for value in found[0]] == [len(PROMPT), 1, 1]
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


# What goes wrong.


def test_values_that_do_not_fit_are_refused(model: VLLM) -> None:
    with (
        pytest.raises(PointValueError, match=r"layers\.1\.attn\.q .* \(8, 4, 32\)"),
        model.trace(PROMPT, **GREEDY),
    ):
        model.layers[1].attn.q = torch.zeros(8, 2, 32)
    with (
        pytest.raises(ValueError, match=r"of shape \(8, 128\), got \(1, 8, 128\)"),
        model.trace(PROMPT, **GREEDY),
    ):
        model.layers[1].output = torch.zeros(1, 8, 128)
    with pytest.raises(PointValueError, match="got float"), model.trace(PROMPT, **GREEDY):
        model.layers[1].output = 0.0
    with pytest.raises(ValueError, match="shape"), model.trace(PROMPT, **GREEDY):
        model.layers[1].skip(torch.zeros(3, HIDDEN_SIZE))


def test_other_dtypes_are_converted(model: VLLM) -> None:
    with model.trace(PROMPT, **GREEDY):
        model.layers[1].output = torch.ones(8, HIDDEN_SIZE, dtype=torch.float64)
        model.layers[2].attn.v = torch.ones(8, 2, 32, dtype=torch.bfloat16)
        hidden = model.layers[2].attn.v.clone().save()
    assert hidden.dtype == torch.float32
    assert bool((hidden == 1).all())


def test_unknown_points_are_errors_at_the_line(model: VLLM) -> None:
    with pytest.raises(UnknownPointError, match=r"layers\.7\.output"), model.trace(PROMPT, **GREEDY):
        model.points["layers.7.output"].sum()


def test_patterns_are_read_only(model: VLLM) -> None:
    with pytest.raises(PatternError, match="cannot be written"), model.trace(PROMPT, **GREEDY):
        model.layers[1].attn.pattern = torch.zeros(4, 8, 8)


def test_a_pattern_of_a_later_step_needs_all_before(model: VLLM) -> None:
    trace = model.trace(PROMPT, max_tokens=3, **GREEDY)
    with pytest.raises(PatternError, match="from the prompt on"), trace as tracer:
        [model.layers[1].attn.pattern for _ in tracer.iter[1]]


# Prompts that come in chunks.


def test_a_prompt_in_chunks_is_read_whole(model: VLLM, local: LanguageModel) -> None:
    with local.trace(torch.tensor([LONG])):
        expected = local.layers[1].output[0].save()
        pattern = local.layers[2].attn.pattern[0].save()
    with model.trace(LONG, **GREEDY):
        stream = model.layers[1].output.save()
    with model.trace(LONG, **GREEDY):
        got = model.layers[2].attn.pattern.save()
    torch.testing.assert_close(stream, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got, pattern, rtol=1e-4, atol=1e-5)


def test_a_prompt_in_chunks_is_written_with_what_the_block_has(model: VLLM, local: LanguageModel) -> None:
    value = torch.randn(len(LONG), HIDDEN_SIZE, generator=torch.Generator().manual_seed(3))
    with local.trace(torch.tensor([LONG])):
        local.layers[1].output = value[None]
        expected = local.logits[0, -1].argmax().item().save()
    with model.trace(LONG, **GREEDY) as tracer:
        model.layers[1].output = value
        result = tracer.result.save()
    assert list(result.outputs[0].token_ids) == [expected]
