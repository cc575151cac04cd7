"""The model's tokenizer in restricted code: one for all requests, so that no block changes it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from nnsight_engine import NNsight
from nnsight_engine.sandbox.restricted import Budget, restricted_policy
from nnsight_engine.serialization import SandboxError
from tests.security.host import Small, message_of, run


class _Cached(PreTrainedTokenizerFast):
    """Gives out its own vocabulary and lists, as vLLM's cached tokenizer does."""

    vocabulary: dict[str, int] = {}  # noqa: RUF012 - it is what the test is about
    special = [1]  # noqa: RUF012

    def get_vocab(self) -> dict[str, int]:
        return self.vocabulary

    @property
    def all_special_ids(self) -> list[int]:
        return self.special


class _WithTokenizer(NNsight):
    tokenizer: Any = None


@pytest.fixture
def model() -> _WithTokenizer:
    inner = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    made = _WithTokenizer(Small())
    tokenizer = _Cached(tokenizer_object=inner, unk_token="[UNK]", pad_token="[UNK]")
    tokenizer.vocabulary = {"a": 0, "[UNK]": 1}
    type(made).tokenizer = tokenizer
    return made


def got(model: NNsight, code: str, budget: Budget) -> Any:
    return run(message_of(code), model, restricted_policy(budget), torch.ones(1, 5))["held"]["got"]


def test_a_block_has_copies(model: _WithTokenizer) -> None:
    code = "t = model.tokenizer\nt.get_vocab().clear()\nt.all_special_ids.append(12345)\ngot = 1"
    assert got(model, code, Budget()) == 1
    assert model.tokenizer.get_vocab() == {"a": 0, "[UNK]": 1}
    assert model.tokenizer.all_special_ids == [1]


@pytest.mark.parametrize(
    "call",
    [
        "t('a', padding='max_length', max_length=20_000_000)",
        "t('a', padding='max_length', max_length=1_000_000)",
        "t.encode('a', padding='max_length', max_length=1_000_000)",
        "t(['a'] * 1000, padding='max_length', max_length=10_000)",
        "t(['a'] * 1000 + ['a' * 10_000], padding=True)",
        "t('a', pad_to_multiple_of=10_000_000, padding=True)",
        "t('a', None, None, None, True, 'max_length', False, 20_000_000)",
        "t('a', tokenizer_file='/etc/passwd')",
        "t.decode([own])",
        "list(map(t, [own]))",
        "t.apply_chat_template([])",
        "t.save_pretrained('/tmp')",
        "t._tokenizer",
        "t.backend_tokenizer",
    ],
)
def test_it_does_not_fill_the_memory_or_reach_further(model: _WithTokenizer, call: str) -> None:
    code = f"t = model.tokenizer\nclass A: pass\nown = A()\ngot = {call}"
    with pytest.raises(SandboxError):
        got(model, code, Budget(max_steps=1000, max_bytes=2**24))


def test_what_blocks_do_with_it(model: _WithTokenizer) -> None:
    code = """
t = model.tokenizer
got = [t('a')['input_ids'], t.encode('a', add_special_tokens=False), t.decode([0]),
    t.decode(torch.tensor([0])), t(['a', 'b'], padding=True, return_tensors='pt').input_ids.shape,
    t.convert_tokens_to_ids('a'),
    t.vocab_size, t.convert_ids_to_tokens([0, 1]), t.pad_token_id, t.batch_decode([[0], [1]]),
    list(map(t.encode, ['a']))]
""".strip()
    assert got(model, code, Budget()) == [
        [0], [0], "a", "a", torch.Size([2, 1]), 0, 2, ["a", "[UNK]"], 1, ["a", "[UNK]"], [[0]],
    ]  # fmt: skip
