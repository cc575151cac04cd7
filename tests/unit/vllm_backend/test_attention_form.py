"""The parameters of vLLM's attention from which patterns are computed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from nnsight_engine.core.errors import InterventionError
from nnsight_engine.vllm_backend.attention_hooks import attention_form


def _attention() -> SimpleNamespace:
    impl = SimpleNamespace(scale=0.5, logits_soft_cap=30.0, alibi_slopes=torch.tensor([0.5, 0.25]))
    parts = {"impl": impl, "sliding_window": 8, "has_sink": False, "use_alibi_sqrt": False}
    return SimpleNamespace(**parts)


def test_all_parameters_are_read() -> None:
    form = attention_form(_attention())
    assert (form.scale, form.soft_cap, form.window) == (0.5, 30.0, 8)
    assert form.slopes is not None
    assert form.slopes.tolist() == [0.5, 0.25]


@pytest.mark.parametrize("name", ["alibi_slopes", "logits_soft_cap", "scale", "has_sink", "use_alibi_sqrt"])
def test_a_parameter_that_vllm_has_renamed_is_named(name: str) -> None:
    attention = _attention()
    delattr(attention.impl if hasattr(attention.impl, name) else attention, name)
    with pytest.raises(InterventionError, match=f"does not expose {name}"):
        attention_form(attention)


@pytest.mark.parametrize("name", ["has_sink", "use_alibi_sqrt"])
def test_what_is_beyond_them_is_refused(name: str) -> None:
    attention = _attention()
    setattr(attention, name, True)
    with pytest.raises(InterventionError, match="has sinks, or roots of distances"):
        attention_form(attention)
