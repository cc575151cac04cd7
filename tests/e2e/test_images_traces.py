"""Blocks of traces on vLLM see a prompt's images where transformers does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from nnsight_engine.envoys.architectures.named_points import UnknownPointError
from nnsight_engine.vllm_backend.vllm import VLLM
from tests.e2e.engine_kinds import options_of_process
from tests.e2e.seeing_reference import IMAGES, LAYER, NUM_TOKENS, TEXT, SeeingReference
from tests.families.checkpoints import HIDDEN_SIZE
from tests.families.reference import reference_activations
from tests.families.seeing import write_idefics3

pytestmark = pytest.mark.e2e

GREEDY: Final[dict[str, Any]] = {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
AT: Final = f"layers.{LAYER}.output"


def assert_close(value: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(value, expected, rtol=1e-3, atol=1e-4)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_idefics3(tmp_path_factory.mktemp("idefics3"))


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> SeeingReference:
    return SeeingReference(checkpoint)


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Iterator[VLLM]:
    options: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": 256,
        "enforce_eager": True,
        "dispatch": True,
    }
    model = VLLM(str(checkpoint), **(options | options_of_process(checkpoint)))
    yield model
    model.shutdown()


def test_values_and_patterns_are_those_of_transformers(model: VLLM, reference: SeeingReference) -> None:
    with model.trace(TEXT, images=list(IMAGES)):
        embedded = model.points["embed.output"].save()
        heads = model.layers[LAYER].attn.heads.save()
        hidden = model.layers[LAYER].output.save()
        logits = model.logits.output.save()
    expected = reference.activations()
    assert_close(embedded, expected["embed.output"])
    assert_close(heads, expected[f"layers.{LAYER}.attn.heads"])
    assert_close(hidden, expected[AT])
    assert_close(logits[0], expected["logits"][-1])


def test_a_write_at_an_image_is_that_of_transformers(model: VLLM, reference: SeeingReference) -> None:
    first, _ = reference.positions_by_image()
    vector = torch.arange(HIDDEN_SIZE).remainder(7).float()
    with model.trace(TEXT, images=list(IMAGES), **GREEDY) as tracer:
        model.points[AT][first] += 3 * vector
        tokens = tracer.result.save()
    expected = reference.generated(first, lambda rows: rows + 3 * vector)
    assert expected != reference.generated()
    assert list(tokens.outputs[0].token_ids) == expected


def test_requests_with_and_without_images_are_as_if_alone(model: VLLM, reference: SeeingReference) -> None:
    prompt = {"prompt": TEXT, "multi_modal_data": {"image": list(IMAGES)}}
    with model.trace() as tracer:
        with tracer.invoke(prompt):
            seen = model.points[AT].save()
        with tracer.invoke(" Rome is good"):
            read = model.points[AT].save()
    assert_close(seen, reference.activations()[AT])
    ids = reference.processor.tokenizer.encode(" Rome is good")
    assert_close(read, reference_activations(reference.checkpoint, ids)[AT])


def test_points_of_images_are_those_of_operations(model: VLLM) -> None:
    for name in ("vision.layers.0.output", "vision.output"):
        assert name not in model.points()
        with pytest.raises(UnknownPointError, match="operations only"):
            model.points[name]


def test_images_are_given_once(model: VLLM) -> None:
    prompt = {"prompt": TEXT, "multi_modal_data": {"image": list(IMAGES)}}
    with pytest.raises(TypeError, match="the same input"), model.trace(prompt, images=list(IMAGES)):
        pass


def test_a_prompt_waits_for_room_for_its_images_and_is_not_split(
    model: VLLM, reference: SeeingReference, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine: Any = model.engine.llm_engine
    manager = engine.engine_core.engine_core.scheduler.encoder_cache_manager
    can_allocate, answers = manager.can_allocate, [True, False]

    def full_at_first(*args: Any) -> bool:
        return can_allocate(*args) and (not answers or answers.pop(0))

    manager.reset()
    monkeypatch.setattr(manager, "can_allocate", full_at_first)
    with model.trace(TEXT, images=list(IMAGES)):
        rows = model.points[AT].save()
    assert not answers
    assert_close(rows, reference.activations()[AT])
