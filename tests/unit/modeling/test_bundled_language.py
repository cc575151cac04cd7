"""The bundled model, real weights: what a trace gives is what transformers computes, in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from nnsight_engine.modeling.bundled import bundled_model_path
from nnsight_engine.modeling.language import LanguageModel
from tests.unit.modeling.conftest import Pair

pytestmark = pytest.mark.e2e

PROMPT = "The Eiffel Tower is in the city of"
OTHER = "Once upon a time"
NUM_TOKENS = 5


@pytest.fixture(scope="module")
def real() -> Pair:
    path: Path = bundled_model_path()
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return Pair(path, LanguageModel(path, dtype=torch.float32), plain, AutoTokenizer.from_pretrained(path))


def test_logits_are_those_of_transformers(real: Pair) -> None:
    with torch.no_grad(), real.model.trace(PROMPT):
        logits = real.model.lm_head.output.save()
    assert torch.equal(logits[0], real.logits(PROMPT))


def test_rows_are_as_if_alone(real: Pair) -> None:
    model = real.model
    with torch.no_grad(), model.trace() as tracer:
        with tracer.invoke(OTHER):
            other = model.lm_head.output.save()
        with tracer.invoke(PROMPT):
            prompt = model.lm_head.output.save()
    expected = real.logits(OTHER)
    torch.testing.assert_close(other[0, -len(expected) :], expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(prompt[0], real.logits(PROMPT), rtol=1e-3, atol=1e-3)


def test_generated_tokens_are_those_of_transformers(real: Pair) -> None:
    model = real.model
    with model.generate(max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS) as tracer:
        with tracer.invoke(OTHER):
            other = tracer.result.save()
        with tracer.invoke(PROMPT):
            prompt = tracer.result.save()
    assert other[0, -NUM_TOKENS:].tolist() == real.continuation(OTHER, NUM_TOKENS)
    assert prompt[0, -NUM_TOKENS:].tolist() == real.continuation(PROMPT, NUM_TOKENS)
