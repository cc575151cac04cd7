"""Text in, and tokens out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from nnsight_engine import LanguageModel, save
from tests.guide.alone import generated, module_of, tokens

INPUTS: dict[str, Callable[[LanguageModel], Any]] = {
    "string": lambda model: "Hello",
    "list of strings": lambda model: ["Hello"],
    "token ids": lambda model: model.tokenizer("Hello")["input_ids"],
    "tensor": lambda model: torch.tensor([model.tokenizer("Hello")["input_ids"]]),
    "encoding": lambda model: model.tokenizer("Hello", return_tensors="pt"),
    "dict": lambda model: {
        "input_ids": torch.tensor([model.tokenizer("Hello")["input_ids"]]),
        "attention_mask": torch.ones(1, 5, dtype=torch.long),
    },
}


@pytest.mark.parametrize("kind", INPUTS)
def test_an_input_may_come_in_many_forms(gpt2: LanguageModel, kind: str) -> None:
    with gpt2.trace(INPUTS[kind](gpt2)):
        logits = gpt2.output.logits.save()
    assert torch.equal(logits, module_of(gpt2)(**tokens(gpt2, "Hello")).logits)


def test_a_list_of_strings_is_a_batch(gpt2: LanguageModel) -> None:
    with gpt2.trace(["Hello", "World"]):
        logits = gpt2.output.logits.save()
    assert torch.equal(logits, module_of(gpt2)(**tokens(gpt2, "Hello", "World")).logits)


def test_the_tokenizer_pads_on_the_left_and_with_the_end_token_if_it_has_no_other(
    gpt2_folder: Path, tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(gpt2_folder)
    tokenizer.pad_token = None
    for file in gpt2_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tokenizer.save_pretrained(tmp_path)
    model = LanguageModel(tmp_path)
    assert model.tokenizer.padding_side == "left"
    assert model.tokenizer.pad_token == model.tokenizer.eos_token


def test_the_tokenizers_own_arguments_win(gpt2_folder: Path) -> None:
    model = LanguageModel(gpt2_folder, tokenizer_kwargs={"padding_side": "right"})
    assert model.tokenizer.padding_side == "right"


def test_generation_is_a_trace_with_a_step_per_token(gpt2: LanguageModel) -> None:
    with gpt2.generate("Hello", max_new_tokens=5) as tracer:
        chosen = save([])
        for _ in tracer.iter[:]:
            chosen.append(gpt2.lm_head.output[0, -1].argmax().item())
        output = tracer.result.save()

    assert torch.equal(output, generated(gpt2, "Hello", max_new_tokens=5))
    assert chosen == output[0, 5:].tolist()


def test_options_of_generation_go_on_to_transformers(gpt2: LanguageModel) -> None:
    options = {"max_new_tokens": 4, "do_sample": True, "temperature": 0.7, "top_k": 5}
    torch.manual_seed(0)
    with gpt2.generate("Hello", **options) as tracer:
        output = tracer.result.save()
    torch.manual_seed(0)
    assert torch.equal(output, generated(gpt2, "Hello", **options))


def test_the_generator_module_has_the_output_and_its_streamer_each_token(gpt2: LanguageModel) -> None:
    with gpt2.generate("Hello", max_new_tokens=3) as tracer:
        streamed = save([])
        for _ in tracer.iter[:3]:
            streamed.append(gpt2.generator.streamer.output.item())
        output = gpt2.generator.output.save()
        result = tracer.result.save()
    assert torch.equal(output, result)
    assert streamed == result[0, 5:].tolist()


def test_several_prompts_are_generated_from_together(gpt2: LanguageModel) -> None:
    with gpt2.generate(max_new_tokens=3) as tracer:
        with tracer.invoke("Hello"):
            first = tracer.result.save()
        with tracer.invoke("World"):
            second = tracer.result.save()
    assert torch.equal(first, generated(gpt2, "Hello", max_new_tokens=3))
    assert torch.equal(second, generated(gpt2, "World", max_new_tokens=3))


def test_a_compiled_cache_does_not_stand_in_the_way(llama: LanguageModel) -> None:
    # transformers compiles the forward pass for a static cache, past which nothing could be read.
    with llama.generate("Hello", max_new_tokens=3, cache_implementation="static") as tracer:
        logits = save([])
        for _ in tracer.iter[:]:
            logits.append(llama.lm_head.output[0, -1].argmax().item())
        output = tracer.result.save()
    assert logits == output[0, 5:].tolist()
    assert torch.equal(output, generated(llama, "Hello", max_new_tokens=3))


@pytest.mark.e2e
def test_a_real_model_continues_a_text(smollm: LanguageModel) -> None:
    with smollm.trace("The Eiffel Tower is in the city of"):
        token = smollm.lm_head.output[0, -1].argmax(dim=-1).save()
    assert smollm.tokenizer.decode(token) == " Paris"
