"""What an invoke on vLLM takes for a prompt, beside what ``LanguageModel`` makes of the same."""

from __future__ import annotations

import array
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BatchEncoding
from vllm import SamplingParams

from nnsight_engine import LanguageModel, bundled_model_path
from nnsight_engine.vllm_backend.prompts import Request, as_prompt

IDS = [504, 6181, 314]

FORMS: dict[str, Callable[[], Any]] = {
    "list": lambda: IDS,
    "tuple": lambda: tuple(IDS),
    "list of lists": lambda: [IDS],
    "tuple of tuples": lambda: (tuple(IDS),),
    "list of numpy's integers": lambda: [np.int64(token) for token in IDS],
    "list of numpy's small integers": lambda: [np.uint16(token) for token in IDS],
    "list of scalars": lambda: [torch.tensor(token) for token in IDS],
    "list of an array": lambda: [np.array(IDS)],
    "list of a tensor": lambda: [torch.tensor(IDS)],
    "array": lambda: np.array(IDS),
    "array of one row": lambda: np.array([IDS]),
    "array of 32 bits": lambda: np.array(IDS, np.int32),
    "array of Python's": lambda: array.array("i", IDS),
    "tensor": lambda: torch.tensor(IDS),
    "tensor of one row": lambda: torch.tensor([IDS]),
    **{
        f"tensor of {dtype}": partial(torch.tensor, IDS, dtype=dtype)
        for dtype in (torch.int16, torch.int32, torch.uint16, torch.uint32)
    },
    "mapping": lambda: {"input_ids": IDS},
    "mapping of arrays": lambda: {"input_ids": np.array([IDS]), "attention_mask": np.ones((1, 3), np.int64)},
    "encoding": lambda: BatchEncoding({"input_ids": IDS, "attention_mask": [1, 1, 1]}),
    "encoding of tensors": lambda: BatchEncoding(
        {"input_ids": torch.tensor([IDS]), "attention_mask": torch.ones(1, 3, dtype=torch.long)}
    ),
    "encoding of arrays": lambda: BatchEncoding({"input_ids": np.array([IDS])}, tensor_type="np"),
    "filled up on the left": lambda: {
        "input_ids": [[2, 2, *IDS]],
        "attention_mask": torch.tensor([[0, 0, 1, 1, 1]]),
    },
    "filled up on the right": lambda: {"input_ids": [*IDS, 2], "attention_mask": [True, True, True, False]},
    "with types of tokens": lambda: {"input_ids": [IDS], "token_type_ids": [[0, 0, 0]]},
}


@pytest.fixture(scope="module")
def local() -> LanguageModel:
    return LanguageModel(str(bundled_model_path()), dispatch=False)


@pytest.mark.parametrize("form", FORMS)
def test_tokens_come_in_any_form_on_both(form: str, local: LanguageModel) -> None:
    prompt = as_prompt(FORMS[form]())
    assert prompt == {"prompt_token_ids": IDS}
    assert {type(token) for token in prompt["prompt_token_ids"]} == {int}, "vLLM takes no others"
    _, read, num_rows = local._prepare_input(FORMS[form]())
    assert num_rows == 1
    assert read["input_ids"][0][read["attention_mask"][0] != 0].tolist() == IDS


@pytest.mark.parametrize("given", ["x", ["x"], ("x",), [["x"]], np.str_("x")])
def test_texts(given: Any) -> None:
    prompt = as_prompt(given)
    assert prompt == {"prompt": "x"}
    assert type(prompt["prompt"]) is str


def test_prompts_of_vllm_and_a_tokenizers_by_name_go_through() -> None:
    given: Any = BatchEncoding({"input_ids": [IDS], "attention_mask": [[1, 1, 1]]})
    assert as_prompt(**given) == {"prompt_token_ids": IDS}
    image = {"image": object()}
    assert as_prompt({"prompt": "x", "multi_modal_data": image}) == {"prompt": "x", "multi_modal_data": image}
    assert as_prompt({"prompt_token_ids": np.array(IDS)}) == {"prompt_token_ids": IDS}
    assert as_prompt([{"prompt_token_ids": IDS}]) == {"prompt_token_ids": IDS}


@pytest.mark.parametrize(
    "given",
    [
        ["x", "y"],
        [IDS, IDS],
        [IDS, [1]],
        np.array([IDS, IDS]),
        torch.tensor([IDS, IDS]),
        [np.array(IDS), np.array(IDS)],
        {"input_ids": [IDS, IDS], "attention_mask": [[1, 1, 1], [1, 1, 1]]},
        [{"input_ids": IDS}, {"input_ids": IDS}],
    ],
)
def test_several_prompts_are_several_invokes(given: Any) -> None:
    with pytest.raises(ValueError, match="write one invoke for each"):
        as_prompt(given)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ([], ValueError),
        ([[]], ValueError),
        (np.array([], np.int64), ValueError),
        (5, TypeError),
        (None, TypeError),
        (object(), TypeError),
        ([1.5], TypeError),
        (np.array([1.0]), TypeError),
        ([True], TypeError),
        (["x", 1], ValueError),
        (b"x", TypeError),
        ({1, 2}, TypeError),
        (np.array(["x"]), TypeError),
        ((token for token in IDS), TypeError),
        (torch.zeros(1, 1, 1, dtype=torch.long), ValueError),
        ({"input_ids": IDS, "inputs_embeds": torch.zeros(3, 4)}, TypeError),
        ({"attention_mask": [1]}, TypeError),
        ({"input_ids": IDS, "attention_mask": [1, 0, 1]}, ValueError),
        ({"input_ids": IDS, "attention_mask": [1, 1]}, ValueError),
        ({"input_ids": IDS, "attention_mask": [0, 0, 0]}, ValueError),
    ],
)
def test_what_is_no_prompt_is_refused(given: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        as_prompt(given)


@pytest.mark.parametrize(
    ("shared", "params", "own", "named"),
    [
        ({"seed": 1}, SamplingParams(), {}, "seed"),
        ({"sampling_params": SamplingParams(), "max_new_tokens": 1}, SamplingParams(), {}, "max_tokens"),
        ({}, None, {"max_tokens": 1, "max_new_tokens": 2}, "max_new_tokens"),
        ({"max_tokens": 1, "max_new_tokens": 1}, None, {}, "max_new_tokens"),
        ({}, None, {"_eos_token_id": 2}, "_eos_token_id"),
    ],
)
def test_sampling_parameters_that_would_have_no_effect_are_refused(
    shared: dict[str, Any], params: Any, own: dict[str, Any], named: str
) -> None:
    with pytest.raises(TypeError, match=named):
        Request({"prompt": "x"}, own, params).sampling_over(shared)
