"""Loading: structure first and weights later, by path, config or module, with transformers' own options."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from transformers import AutoConfig, GPT2LMHeadModel

from nnsight_engine.core.saves import save
from nnsight_engine.modeling import vllm
from nnsight_engine.modeling.language import LanguageModel
from nnsight_engine.modeling.mixins.meta import MetaMixin
from nnsight_engine.modeling.transformers import TransformersModel
from tests.hook_reference import outputs_of
from tests.unit.modeling.conftest import LONG, Pair


def test_weights_come_with_the_first_run_and_not_before(gpt2: Pair) -> None:
    model = LanguageModel(gpt2.path)
    before = model.dispatched, model.device
    assert before == (False, torch.device("meta"))
    first = model.transformer.h[0]
    with model.trace(LONG):
        logits = model.output.logits.save()
    assert model.dispatched
    assert model.transformer.h[0] is first
    assert first.device == torch.device("cpu")
    assert torch.equal(logits[0], gpt2.logits(LONG))


def test_dispatch_loads_once(gpt2: Pair) -> None:
    model = LanguageModel(gpt2.path)
    model.dispatch()
    loaded = model._module
    model.dispatch()
    assert model._module is loaded
    assert LanguageModel(gpt2.path, dispatch=True).dispatched


def test_source_asked_for_before_is_that_of_the_loaded_module(gpt2: Pair) -> None:
    model = LanguageModel(gpt2.path)
    assert "self_c_proj_0" in str(model.transformer.h[0].attn.source)
    before = model.transformer.h[0].attn.source.self_c_proj_0
    model.dispatch()
    with model.trace(LONG):
        projected = model.transformer.h[0].attn.source.self_c_proj_0.output.save()
    with model.trace(LONG):
        same = before.output.save()
    inputs = gpt2.tokenizer(LONG, return_tensors="pt")
    assert torch.equal(projected, *outputs_of(gpt2.plain, inputs, "transformer.h.0.attn.c_proj"))
    assert torch.equal(projected, same)


def test_operations_taken_before_a_trace_loads_the_model_are_read_in_it(gpt2: Pair) -> None:
    model = LanguageModel(gpt2.path)
    source = model.transformer.h[0].attn.source
    function, inner = source.attention_interface_0, source.attention_interface_0.source
    attended = next(one for one in inner if "scaled_dot_product_attention" in str(one.path))
    assert not model.dispatched
    with model.trace(LONG):
        found = save([attended.output, function.output[0]])
    assert torch.equal(found[0].transpose(1, 2), found[1])


def test_a_call_outside_of_traces_loads_too(gpt2: Pair) -> None:
    model = LanguageModel(gpt2.path)
    with torch.no_grad():
        logits = model(**gpt2.tokenizer(LONG, return_tensors="pt")).logits
    assert torch.equal(logits[0], gpt2.logits(LONG))
    assert LanguageModel(gpt2.path).generate(LONG, max_new_tokens=1).shape[0] == 1


def test_an_edited_copy_and_its_original_share_their_weights(gpt2: Pair) -> None:
    model = LanguageModel(gpt2.path)
    with model.edit() as edited:
        model.transformer.h[0].output[:] = 0
    with edited.trace(LONG):
        changed = edited.output.logits.save()
    assert model.dispatched
    assert model._module is edited._module
    with model.trace(LONG):
        plain = model.output.logits.save()
    assert torch.equal(plain[0], gpt2.logits(LONG))
    assert not torch.equal(changed, plain)


def test_a_failed_dispatch_can_be_repeated() -> None:
    class Flaky(MetaMixin):
        attempts = 0

        def _load(self, source: Any) -> torch.nn.Module:
            self.attempts += 1
            if self.attempts == 1:
                raise OSError("unplugged")
            return torch.nn.Linear(2, 2)

        def _load_meta(self, source: Any) -> torch.nn.Module:
            return torch.nn.Linear(2, 2)

    model = Flaky("somewhere")
    with pytest.raises(OSError, match="unplugged"):
        model.dispatch()
    model.dispatch()
    assert model.device == torch.device("cpu")


def test_options_go_to_transformers(gpt2: Pair) -> None:
    model = LanguageModel(gpt2.path, torch_dtype=torch.bfloat16, attn_implementation="eager")
    assert model.dtype == torch.bfloat16
    model.dispatch()
    assert model.dtype == torch.bfloat16
    assert model.config._attn_implementation == "eager"
    for device_map in ("cpu", "auto"):
        mapped = LanguageModel(gpt2.path, device_map=device_map, dispatch=True)
        assert mapped.device == torch.device("cpu")


def test_a_config_can_be_passed_along(gpt2: Pair) -> None:
    config = AutoConfig.from_pretrained(gpt2.path, num_hidden_layers=2)
    model = LanguageModel(gpt2.path, config=config)
    assert len(model.transformer.h) == 2
    model.dispatch()
    assert len(model.transformer.h) == 2


def test_a_config_alone_gives_random_weights(gpt2: Pair) -> None:
    model = LanguageModel(AutoConfig.from_pretrained(gpt2.path), tokenizer=gpt2.tokenizer)
    with model.trace(LONG):
        logits = model.output.logits.save()
    assert logits.isfinite().all()
    assert isinstance(model._module, GPT2LMHeadModel)


def test_it_knows_where_it_comes_from(gpt2: Pair) -> None:
    assert gpt2.model.repo_id == str(gpt2.path)
    assert LanguageModel(gpt2.plain, tokenizer=gpt2.tokenizer).repo_id == str(gpt2.path)


def test_options_for_loading_are_refused_with_a_module(gpt2: Pair) -> None:
    with pytest.raises(TypeError, match="device_map"):
        LanguageModel(gpt2.plain, tokenizer=gpt2.tokenizer, device_map="cpu")


def test_any_model_of_transformers_loads_without_tokenizer(gpt2: Pair) -> None:
    model = TransformersModel(gpt2.path)
    ids = gpt2.tokenizer(LONG, return_tensors="pt")["input_ids"]
    with torch.no_grad(), model.trace(ids):
        hidden = model.output.last_hidden_state.save()
        assert model.dispatched
    expected = gpt2.plain.transformer(ids).last_hidden_state
    torch.testing.assert_close(hidden, expected)


def test_the_import_path_of_vllm_that_nnsights_users_know_does_not_load_it() -> None:
    program = "import nnsight_engine.modeling.vllm, sys\nprint('vllm' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "False"
    with pytest.raises(AttributeError, match="it offers VLLM"):
        _ = vllm.LLM  # type: ignore[attr-defined] # the point of the test
