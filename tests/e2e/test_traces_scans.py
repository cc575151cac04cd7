"""Scans and checks in the serving engine, which compute nothing and keep nothing."""

from __future__ import annotations

import traceback

import pytest
import torch
from typing_extensions import override

from nnsight_engine import save
from nnsight_engine.interleaving.events import MissedProviderError
from nnsight_engine.tracing.source_text import WithBlockNotFoundError
from nnsight_engine.vllm_backend.vllm import VLLM
from nnsight_engine.vllm_backend.vllm_tracer import Purpose, SentTrace
from tests.e2e.renamed_model import GREEDY, PROMPT, model, plain_tokens
from tests.e2e.traces import HeldTracer, run_together

__all__ = ["model"]  # fixtures

pytestmark = pytest.mark.e2e


def test_a_scan_gives_shapes_and_keeps_nothing(model: VLLM) -> None:
    num_tokens = len(model.tokenizer.encode(PROMPT))
    with model.scan(PROMPT, max_tokens=2, ignore_eos=True) as tracer:
        hidden = model.layers[1].output.save()
        width = save(model.layers[2].mlp.output.shape[-1])
        logits = save([])
        for _ in tracer.iter[:]:
            logits.append(model.logits.output)
        result = tracer.result.save()
    assert (hidden.shape, hidden.is_meta, hidden.dtype) == ((num_tokens, 128), True, torch.float32)
    assert width == 128
    assert [(one.shape, one.is_meta) for one in logits] == [((1, 319), True)] * 2
    assert len(result.outputs[0].token_ids) == 2
    assert model.model.layers[1].mlp.output.shape == (num_tokens, 128)
    assert model.model.layers[2].mlp.input.shape == (num_tokens, 128)
    assert model.layers[3].attn.heads.shape == (num_tokens, 4, 32)
    assert model.points["layers.0.attn.pattern"].shape == (4, num_tokens, num_tokens)
    assert model.logits.output.shape == (1, 319)


class HeldCheck(HeldTracer):
    """A trace that is encoded to be checked."""

    @override
    def _run_model(self) -> None:
        self.sent = SentTrace(self, Purpose.CHECK)


def test_a_check_comes_before_the_run(model: VLLM) -> None:
    ran = []
    with pytest.raises(RuntimeError, match="size mismatch") as caught:
        with model.trace(PROMPT, validate=True):
            ran = save([1])
            model.layers[1].output @ torch.ones(3)  # the line
    assert ran == []
    assert any("# the line" in str(one.line) for one in traceback.extract_tb(caught.value.__traceback__))
    kept: list[int] = save([])
    with model.trace(PROMPT, validate=True, max_tokens=4, ignore_eos=True, **GREEDY) as tracer:
        third = save(0)
        for step in tracer.iter[2]:
            third = save(step)
        for _ in tracer.iter[3:]:
            tokens = model.samples.output.save()
    assert third == 2
    assert kept == []
    assert int(tokens) == plain_tokens(model, PROMPT, 4)[-1]
    with model.trace(PROMPT, validate=True, max_tokens=4, ignore_eos=True, **GREEDY) as tracer:
        several = []
        for step in tracer.iter[:]:
            several += [step]
        last = save(several[3])
    assert last == 3
    with model.trace(PROMPT, max_tokens=60, tracer_cls=HeldCheck, ignore_eos=True) as held:
        for _ in held.iter[:]:
            model.layers[1].output[:] = 0
    assert run_together(model, [held.sent]).num_steps < 10, "a check ends once a block asks for nothing new"
    with pytest.raises(MissedProviderError, match="step 2 was not reached"):
        with model.trace(PROMPT, scan=True) as tracer:
            for _ in tracer.iter[2]:
                pass


def test_statements_that_would_do_nothing_are_refused(model: VLLM) -> None:
    with pytest.raises(WithBlockNotFoundError, match=r"with model.trace\(\.\.\.\):"):
        model.trace(PROMPT)
    with pytest.raises(WithBlockNotFoundError, match=r"with model.scan\(\.\.\.\):"):
        model.scan(PROMPT)
    with pytest.raises(WithBlockNotFoundError, match=r"with model.edit\(\.\.\.\):"):
        model.edit()
    with pytest.raises(TypeError, match="fn="):
        _ = model.trace(PROMPT, fn=print)
