"""Names and classes of one's own, and what a request is given, the same on both engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.model_executor.models.llama import LlamaMLP

from nnsight_engine import LanguageModel, save
from nnsight_engine.modeling import vllm as modeling_vllm
from nnsight_engine.vllm_backend.traces.model import Names
from nnsight_engine.vllm_backend.vllm import VLLM
from tests.e2e.renamed_model import GREEDY, LONG, PROMPT, close, local, model, plain_tokens

__all__ = ["local", "model"]  # fixtures

pytestmark = pytest.mark.e2e


def test_custom_names_and_classes_are_the_same_on_both(model: VLLM, local: LanguageModel) -> None:
    found = []
    for engine, options in ((model, GREEDY), (local, {})):
        with engine.trace(PROMPT, **options):
            embedded = engine.model.embed_tokens.half.save()
            first = engine.blocks[0].ff.half.save()
            half = engine.stages[1].feed.half
            half[:] = 3.0
            written = engine.layers[1].mlp.half.save()
            stream = engine.stages[2].output.save()
            heads = engine.stages[3].attention.heads.save()
            attended = engine.points["layers.3.attn.output"].save()
        found.append((embedded, first, written, stream, heads, attended))
    for ours, theirs in zip(*found, strict=True):
        close(ours, theirs)
    assert bool((found[0][2] == 3.0).all())


def test_the_class_has_the_name_that_ported_code_imports() -> None:
    assert modeling_vllm.VLLM is VLLM


def test_names_that_cannot_be_are_refused(model: VLLM, renamed_checkpoint: Path) -> None:
    with pytest.raises(TypeError, match="subclass of Envoy"):
        VLLM(str(renamed_checkpoint), envoys={LlamaMLP: torch.nn.Linear})  # type: ignore[dict-item] # the point
    with pytest.raises(ValueError, match="both"):
        model.call_workers("adopt_names", Names({"mlp": "same", "self_attn": "same"}).write())
    with model.trace(PROMPT, **GREEDY):
        still = save(model.blocks[0].ff.half.shape)
    assert still[-1] == 128


@pytest.mark.parametrize("asked", ["call", "assignment", "not"])
def test_gradients_say_what_they_need(model: VLLM, asked: str) -> None:
    with pytest.raises(RuntimeError) as caught, model.trace(PROMPT, **GREEDY):
        hidden = model.layers[1].output
        if asked == "call":
            hidden.requires_grad_(True)
        elif asked == "assignment":
            hidden.requires_grad = True
        with model.logits.output.sum().backward():
            hidden.grad.save()
    said = [str(caught.value), *getattr(caught.value, "__notes__", ())]
    assert any("use LanguageModel, here or on a server with --local-engine" in text for text in said), said


# What a request is given.


def test_sampling_parameters_come_by_name_or_as_an_object(model: VLLM) -> None:
    def lengths(*invokes: dict[str, Any], **trace: Any) -> list[int]:
        with model.trace(**trace) as tracer:
            outputs = save([])
            for options in invokes:
                with tracer.invoke(PROMPT, **options):
                    outputs.append(tracer.result)
        return sorted(len(output.outputs[0].token_ids) for output in outputs)

    params = SamplingParams(max_tokens=4, ignore_eos=True, **GREEDY)
    mine = SamplingParams(max_tokens=2, ignore_eos=True, **GREEDY)
    own: list[dict[str, Any]] = [{}, {"max_tokens": 3}, {"sampling_params": mine}, {"max_new_tokens": 5}]
    assert lengths(*own, sampling_params=params) == [2, 3, 4, 5]
    assert lengths({}, {"max_tokens": 3}, sampling_params=params, max_tokens=6) == [3, 6]
    assert lengths({"sampling_params": params, "max_tokens": 7}, {}) == [1, 7]
    assert lengths({"max_new_tokens": 3}, {}, max_tokens=2, ignore_eos=True) == [2, 3]
    assert (params.max_tokens, mine.max_tokens) == (4, 2)
    with model.trace(PROMPT, sampling_params=params, max_tokens=3, logprobs=2) as tracer:
        result = tracer.result.save()
    assert len(result.outputs[0].logprobs) == 3
    with model.trace(
        PROMPT, sampling_params=SamplingParams(max_tokens=3), **GREEDY, ignore_eos=True
    ) as tracer:
        result = tracer.result.save()
    assert list(result.outputs[0].token_ids) == plain_tokens(model, PROMPT, 3)


def test_what_would_have_no_effect_is_refused(model: VLLM) -> None:
    params = SamplingParams(max_tokens=4)
    for options, named in (
        ({"nonsense": 8}, "no sampling parameter nonsense"),
        ({"sampling_params": params, "nonsense": 8}, "no sampling parameter nonsense"),
        ({"temprature": 0.0}, "did you mean temperature"),
        ({"sampling_params": {"max_tokens": 8}}, "takes vLLM's SamplingParams, got dict"),
        ({"max_tokens": 1, "max_new_tokens": 2}, "same parameter"),
    ):
        with pytest.raises(TypeError, match=named):
            with model.trace(PROMPT, **options):
                pass
        with pytest.raises(TypeError, match=named):
            with model.trace() as tracer:
                with tracer.invoke(PROMPT, **options):
                    pass
        with pytest.raises(TypeError, match=named):
            with model.trace(**options) as tracer:
                with tracer.invoke(PROMPT):
                    pass
    with pytest.raises(TypeError, match="those of the trace would have no effect: temperature"):
        with model.trace(temperature=0.0) as tracer:
            with tracer.invoke(PROMPT, sampling_params=params):
                pass
    with pytest.raises(VLLMValidationError, match="temperature"):
        with model.trace(PROMPT, sampling_params=params, temperature=-1.0):
            pass


def test_tokens_come_in_any_form(model: VLLM, local: LanguageModel) -> None:
    ids = model.tokenizer.encode(PROMPT)
    encoded = model.tokenizer([PROMPT], return_tensors="np")
    filled = model.tokenizer([PROMPT, LONG], return_tensors="pt", padding=True)
    forms: list[Any] = [
        np.array(ids), np.array([ids], np.int32), [np.int64(token) for token in ids], encoded, tuple(ids),
        torch.tensor([ids], dtype=torch.int32), {name: value[:1] for name, value in filled.items()},
    ]  # fmt: skip
    with model.trace(**GREEDY) as tracer:
        seen = save([])
        for form in forms:
            with tracer.invoke(form):
                seen.append(model.layers[1].output)
        with tracer.invoke(**encoded):
            seen.append(model.layers[1].output)
    with local.trace(PROMPT):
        expected = local.layers[1].output.save()
    assert len(seen) == len(forms) + 1
    for value in seen:
        close(value, expected)


def test_logits_have_one_name_on_both(model: VLLM, local: LanguageModel) -> None:
    found = []
    for traced, options in ((model, GREEDY), (local, {})):
        with traced.trace(PROMPT, **options):
            logits = traced.points["logits"][..., -1, :].save()
        found.append(logits.flatten())
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)
    wanted = torch.full((1, found[0].shape[-1]), -1e3)
    wanted[:, 42] = 0
    with model.trace(PROMPT, **GREEDY):
        model.points["logits"] = wanted
        token = model.samples.output.item().save()
    assert token == 42
    with local.trace(PROMPT):
        local.points["logits"][:, -1] = wanted
        token = local.output.logits[0, -1].argmax().item().save()
    assert token == 42
