"""The text shown for a token names that token, in every vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.fields import Token
from nnsight_engine import bundled_model_path
from nnsight_engine.core.token_texts import NoSuchTokenError, TokenTexts
from nnsight_engine.plans.compile.scope import CompileScope
from tests.fakes.model_specs import tiny_spec

BYTES = {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
WORDS = [
    "▁",
    "▁P",
    "ar",
    "is",
    "P",
    "Par",
    "▁Par",
    "▁Paris",
    "▁▁",
    "▁▁▁",
    "é",
    "▁é",
    "A",
    "▁of",
    "▁X",
    "\u2028",
    "¡",
]
NASTY = [
    "x", " x", "▁x", "Ġx", "Ġ", "▁", " ", "  ", "A", "<0x41>", "<0xE2>", "<0x20>", "<0xe2>", "<0x0A>",
    "\n", "Ċ", "â", "Ã¢", "âĢ", "¢", "<token 1>", "<token 99>", "�", "ï¿½", "<0xE2><0x80>", "##x",
    "x" * 300, "é", "Ã©", "\x00",
]  # fmt: skip


def bundled() -> PreTrainedTokenizerFast:
    """Return the bundled model's tokenizer, of bytes."""
    return AutoTokenizer.from_pretrained(bundled_model_path())


def metaspace(prepend: str = "always") -> PreTrainedTokenizerFast:
    """Return one of SentencePiece's form that falls back to bytes, as Llama 2's and Phi 3's."""
    names = ["<unk>", "<s>", "</s>", *BYTES, *WORDS]
    merges = [
        ("▁", "P"), ("▁P", "ar"), ("▁Par", "is"), ("P", "ar"), ("▁", "▁"), ("▁▁", "▁"), ("▁", "é"),
    ]  # fmt: skip
    pieces = [*"Pario sf", "▁of"]
    names += [piece for piece in pieces if piece not in names]
    merges = [("a", "r"), ("i", "s"), *merges, ("o", "f"), ("▁", "of")]
    names += [name for name in ("of",) if name not in names]
    vocabulary = {name: at for at, name in enumerate(names)}
    model = models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer = Tokenizer(model)
    if prepend == "always":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        steps = [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
        tokenizer.decoder = decoders.Sequence(steps)
    else:  # as Gemma's and T5's
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=prepend, split=False)
        tokenizer.decoder = decoders.Metaspace("▁", prepend_scheme=prepend)
    tokenizer.add_special_tokens(["<s>", "</s>", AddedToken("<|end|>", special=True), AddedToken(" X")])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


SPEC = tiny_spec(vocab_size=50_000)
TOKENIZERS: Mapping[str, Callable[[], PreTrainedTokenizerFast]] = {
    "bundled": bundled,
    "metaspace": metaspace,
    "metaspace of Gemma's form": lambda: metaspace("never"),
}


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_every_token_is_named_by_its_text(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]()
    texts = TokenTexts(tokenizer)
    ids = range(len(tokenizer) + 3)  # models' vocabularies are longer than tokenizers'
    shown = [texts.text(token_id) for token_id in ids]
    assert len(set(shown)) == len(shown)
    assert TypeAdapter(list[Token]).validate_python(shown) == shown, "a request can have it"
    for start in range(0, len(shown), 1000):  # of which a request can name so many
        scope = CompileScope(SPEC, [0], 4, texts.token)
        for token_id in ids[start : start + 1000]:
            assert scope.token_id(shown[token_id], "where.tokens.0") == token_id


def test_blanks_are_part_of_a_text() -> None:
    tokenizer = metaspace()
    texts = TokenTexts(tokenizer)
    vocabulary = tokenizer.get_vocab()
    assert texts.token(" Paris") == vocabulary["▁Paris"] == texts.token("▁Paris")
    assert [texts.text(token) for token in tokenizer.encode("Paris  of")] == [" Paris", "  ", "of"]
    assert texts.token(" Par") == vocabulary["▁Par"]
    assert texts.token("Par") == vocabulary["Par"], "what the tokenizer itself never makes of it at a start"
    assert texts.token(" X") == vocabulary[" X"], "an added token comes first"
    assert texts.text(vocabulary["▁X"]) == "▁X"
    with pytest.raises(NoSuchTokenError, match=r"is 1 token for the tokenizer: ' Paris'"):
        texts.token("Paris")


def test_bytes_are_written_as_such() -> None:
    tokenizer = metaspace()
    texts = TokenTexts(tokenizer)
    vocabulary = tokenizer.get_vocab()
    assert texts.text(vocabulary["<0xE2>"]) == "<0xE2>"
    assert texts.token("\n") == vocabulary["<0x0A>"]
    assert texts.token("A") == vocabulary["A"]
    assert texts.text(vocabulary["<0x41>"]) == "<0x41>"
    ours = TokenTexts(bundled())
    assert ours.text(ours.token(" Paris")) == " Paris"
    partial = bundled().encode("€", add_special_tokens=False)
    assert "".join(ours.text(token) for token in partial) in {"€", "<0xE2><0x82><0xAC>"}
    assert [ours.token(ours.text(token)) for token in partial] == partial


@given(
    st.lists(st.sampled_from(NASTY), unique=True, min_size=1), st.lists(st.sampled_from(NASTY), max_size=4)
)
@pytest.mark.parametrize(
    "decoder",
    [
        decoders.ByteLevel(),
        decoders.Metaspace(),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
        decoders.WordPiece(),
    ],
    ids=["bytes", "metaspace", "byte fallback", "word pieces"],
)
def test_texts_name_one_token_whatever_the_vocabulary(
    decoder: decoders.Decoder, names: list[str], added: list[str]
) -> None:
    inner = Tokenizer(models.WordLevel({name: at for at, name in enumerate(names)}, unk_token=names[0]))
    inner.decoder = decoder
    inner.add_tokens(added)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    texts = TokenTexts(tokenizer)
    for token_id in range(len(tokenizer)):
        assert texts.token(texts.text(token_id)) == token_id


def test_what_is_not_one_token_says_what_it_is() -> None:
    scope = CompileScope(SPEC, [0], 4, TokenTexts(bundled()).token)
    with pytest.raises(ApiError, match=r"'E', 'iffel', ' Tower'") as caught:
        scope.token_id("Eiffel Tower", "where.tokens.0")
    assert (caught.value.code, caught.value.param) == (ErrorCode.UNKNOWN_TOKEN, "where.tokens.0")
    with pytest.raises(ApiError, match="between 0 and 49999"):
        scope.token_id("<token 50000>", "where.tokens.0")
    for text in ("", "\x00\x00\x00\x00", "😀😀😀"):
        with pytest.raises(ApiError, match="exactly one token"):
            scope.token_id(text, "where.tokens.0")
