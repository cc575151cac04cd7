"""A language model computes what transformers computes, in whatever form its input comes."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    AutoTokenizer,
    RobertaConfig,
    RobertaForMaskedLM,
)

from nnsight_engine.core.saves import save
from nnsight_engine.modeling.language import LanguageModel
from tests.families.checkpoints import build_tokenizer
from tests.unit.modeling.conftest import LONG, SHORT, Pair


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Filling rows up changes the order in which the same numbers are added, and nothing else."""
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=5e-5)


def test_logits_are_those_of_transformers(pair: Pair) -> None:
    with torch.no_grad(), pair.model.trace(LONG):
        logits = pair.model.output.logits.save()
    assert torch.equal(logits[0], pair.logits(LONG))


@pytest.mark.parametrize("side", ["left", "right"])
def test_rows_of_several_invokes_are_as_if_alone(pair: Pair, side: str) -> None:
    model = LanguageModel(pair.plain, tokenizer=AutoTokenizer.from_pretrained(pair.path, padding_side=side))
    with torch.no_grad(), model.trace() as tracer:
        with tracer.invoke(SHORT):
            first = model.output.logits.save()
        with tracer.invoke([LONG, SHORT]):
            second = model.output.logits.save()
        with tracer.invoke():
            whole = model.output.logits.save()
    assert (len(first), len(second), len(whole)) == (1, 2, 3)
    short, long = pair.logits(SHORT), pair.logits(LONG)
    kept = slice(-len(short), None) if side == "left" else slice(len(short))
    assert_near(first[0, kept], short)
    assert_near(second[0], long)
    assert_near(second[1, kept], short)


@pytest.mark.parametrize("form", ["lists", "1d", "2d", "keyword", "named"])
def test_further_forms_of_input_give_the_same(gpt2: Pair, form: str) -> None:
    ids = gpt2.tokenizer(SHORT)["input_ids"]
    tensor = torch.tensor([ids])
    forms: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
        "lists": (([ids],), {}),
        "1d": ((tensor[0],), {}),
        "2d": ((tensor,), {}),
        "keyword": ((), {"input_ids": tensor}),
        "named": ((), {"inputs_embeds": gpt2.plain.transformer.wte(tensor)}),
    }
    args, kwargs = forms[form]
    with torch.no_grad(), gpt2.model.trace(*args, **kwargs):
        logits = gpt2.model.output.logits.save()
    assert_near(logits[0], gpt2.logits(SHORT))


def test_positions_are_passed_only_where_rows_are_padded(gpt2: Pair) -> None:
    model = gpt2.model
    with model.trace(SHORT):
        alone = model.inputs[1].save()
    with model.trace([SHORT, LONG]):
        filled = model.inputs[1].save()
    assert "position_ids" not in alone
    num_filled = int((filled["attention_mask"][0] == 0).sum())
    assert filled["position_ids"][0, num_filled:].tolist() == list(
        range(len(gpt2.tokenizer(SHORT)["input_ids"]))
    )


def test_labels_give_the_loss_of_transformers(gpt2: Pair) -> None:
    model, ids = gpt2.model, gpt2.tokenizer(LONG, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        with model.trace(LONG, labels=LONG):
            loss = model.output.loss.save()
        with model.trace() as tracer:
            with tracer.invoke(SHORT):  # no labels: ignored
                pass
            with tracer.invoke(LONG, labels=ids):
                batched = model.output.loss.save()
        expected = gpt2.plain(ids, labels=ids).loss
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(batched, expected)


def test_arguments_of_the_trace_are_for_all_invokes(gpt2: Pair) -> None:
    with gpt2.model.trace(output_hidden_states=True) as tracer:
        with tracer.invoke(SHORT):
            hidden = gpt2.model.output.hidden_states[-1].save()
        with tracer.invoke(LONG):
            pass
    assert len(hidden) == 1


def test_an_invoke_gives_its_own_input_as_the_model_takes_it(gpt2: Pair) -> None:
    with gpt2.model.trace() as tracer:
        with tracer.invoke(LONG):
            pass
        with tracer.invoke(SHORT) as invoke:
            inputs = save(invoke.inputs)
    expected = gpt2.tokenizer(SHORT, return_tensors="pt")
    args, kwargs = inputs
    assert args == ()
    assert torch.equal(kwargs["input_ids"], expected["input_ids"])
    assert bool(kwargs["attention_mask"].all())


def test_invokes_that_ask_for_different_things_are_refused(gpt2: Pair) -> None:
    with (  # noqa: PT012 - a trace fails where its block ends
        pytest.raises(ValueError, match="max_new_tokens applies to all invokes"),
        gpt2.model.generate() as tracer,
    ):
        with tracer.invoke(SHORT, max_new_tokens=2):
            pass
        with tracer.invoke(SHORT, max_new_tokens=3):
            pass


def test_an_invoke_without_input_takes_no_arguments(gpt2: Pair) -> None:
    with (  # noqa: PT012
        pytest.raises(ValueError, match="an invoke without an input"),
        gpt2.model.trace() as tracer,
    ):
        with tracer.invoke(SHORT):
            pass
        with tracer.invoke(use_cache=False):
            pass


def test_two_inputs_are_refused(gpt2: Pair) -> None:
    with pytest.raises(TypeError, match="takes one input, got 2"), gpt2.model.trace(SHORT, LONG):
        pass


@pytest.mark.parametrize("given", [42, 4.2, True, None, b"text", {"a", "b"}, object(), [None], ["a", 3], max])
def test_what_is_no_prompt_is_refused(gpt2: Pair, given: Any) -> None:
    refused = r"input_ids must be text, token ids, .*, got "
    with pytest.raises(TypeError, match=refused), gpt2.model.trace(given):
        pass
    with pytest.raises(TypeError, match=refused), gpt2.model.trace() as tracer, tracer.invoke(given):
        pass


def test_a_trace_with_max_new_tokens_generates(gpt2: Pair) -> None:
    with gpt2.model.trace(SHORT, max_new_tokens=3, do_sample=False) as tracer:
        logits = save([])
        for _ in tracer.iter[:]:
            logits.append(gpt2.model.lm_head.output[:, -1])
        tokens = tracer.result.save()
    with gpt2.model.generate(SHORT, max_new_tokens=3, do_sample=False) as tracer:
        expected = gpt2.model.generator.output.save()
    assert torch.equal(tokens, expected)
    assert torch.equal(torch.stack(logits).argmax(-1)[:, 0], expected[0, -3:])
    with gpt2.model.trace() as tracer, tracer.invoke(SHORT, max_new_tokens=3, do_sample=False):
        last = gpt2.model.lm_head.next(2).output[:, -1].save()
    assert torch.equal(last, logits[2])


def test_generation_arguments_of_a_trace_that_does_not_generate_are_refused(gpt2: Pair) -> None:
    with (
        pytest.raises(TypeError, match=r"do_sample is for generation.*without max_new_tokens="),
        gpt2.model.trace(SHORT, do_sample=True),
    ):
        pass


def test_a_tokenizer_that_is_passed_is_left_as_it_is(gpt2: Pair) -> None:
    tokenizer = AutoTokenizer.from_pretrained(gpt2.path, padding_side="right", pad_token=None)
    model = LanguageModel(gpt2.plain, tokenizer=tokenizer)
    with model.trace([SHORT, LONG]):
        mask = model.inputs[1]["attention_mask"].save()
    assert mask[0, 0] == 1
    assert mask[0, -1] == 0
    assert tokenizer.padding_side == "right"


def test_a_loaded_tokenizer_pads_on_the_left_by_default(gpt2: Pair) -> None:
    assert gpt2.model.tokenizer.padding_side == "left"
    assert (
        LanguageModel(gpt2.path, tokenizer_kwargs={"padding_side": "right"}).tokenizer.padding_side == "right"
    )


def test_a_loaded_tokenizer_without_pad_token_gets_the_end_token(gpt2: Pair, tmp_path: Path) -> None:
    AutoConfig.from_pretrained(gpt2.path).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(gpt2.path)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    assert LanguageModel(tmp_path).tokenizer.pad_token == tokenizer.eos_token


# RoBERTa has modules called `output`, of which the envoys warn.
@pytest.mark.filterwarnings("ignore:.*has a module called `output`")
def test_a_masked_language_model_that_works_out_its_positions_itself(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    config = RobertaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        pad_token_id=0,
    )
    RobertaForMaskedLM(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model = LanguageModel(tmp_path, automodel="AutoModelForMaskedLM")
    plain = AutoModelForMaskedLM.from_pretrained(tmp_path)
    with torch.no_grad(), model.trace([SHORT, LONG]):
        logits = model.output.logits.save()
    with torch.no_grad():
        alone = plain(**model.tokenizer(SHORT, return_tensors="pt")).logits[0]
    assert_near(logits[0, -len(alone) :], alone)


def test_an_unknown_auto_class_is_refused(gpt2: Pair) -> None:
    with pytest.raises(ValueError, match="got 'AutoModelForNothing'"):
        LanguageModel(gpt2.path, automodel="AutoModelForNothing")


def test_nothing_warns(gpt2: Pair) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with gpt2.model.generate([SHORT, LONG], max_new_tokens=2):
            pass


@pytest.mark.parametrize("how", ["trace", "scan", "invoke", "trace for invokes", "not entered"])
@pytest.mark.parametrize("name", ["max_token", "trace", "output_hiden_states"])
def test_arguments_that_nothing_takes_are_refused(pair: Pair, how: str, name: str) -> None:
    model: Any = pair.model
    unknown = {name: 5}

    def run() -> None:
        if how == "not entered":
            _ = model.trace(SHORT, **unknown)
        elif how in {"trace", "scan"}:
            with getattr(model, how)(SHORT, **unknown):
                model.output.save()
        else:
            shared, own = (unknown, {}) if how == "trace for invokes" else ({}, unknown)
            with model.trace(**shared) as tracer, tracer.invoke(SHORT, **own):
                model.output.save()

    with pytest.raises(TypeError, match=f"no argument {name}") as caught, torch.no_grad():
        run()
    near = {"max_token": "max_new_tokens", "output_hiden_states": "output_hidden_states"}
    assert name not in near or f"did you mean {near[name]}?" in str(caught.value)


@pytest.mark.parametrize(
    "name", ["output_hidden_states", "return_dict", "use_cache", "cu_seq_lens_q", "nothing"]
)
def test_arguments_that_some_module_takes_are_passed_on(pair: Pair, name: str) -> None:
    options: dict[str, Any] = {name: None if name in {"cu_seq_lens_q", "nothing"} else True}
    with torch.no_grad(), pair.model.trace(SHORT, **options):
        logits = pair.model.output.logits.save()
    assert torch.equal(logits[0], pair.logits(SHORT))


def test_a_part_of_a_model_is_traced_here(pair: Pair) -> None:
    part = pair.model.lm_head
    with pytest.raises(TypeError, match="leave remote= out"):
        _ = part.trace(torch.ones(1, 2), remote="local")
