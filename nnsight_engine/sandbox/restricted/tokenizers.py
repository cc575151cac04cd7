"""The model's tokenizer for code: it is one for all requests, so that code gets copies, and few arguments.

A tokenizer pads to whatever length it is told, and its options reach files, templates and its own settings.
"""

from __future__ import annotations

from typing import Any, Final

from nnsight_engine.sandbox.restricted.arguments import plain
from nnsight_engine.sandbox.restricted.budget import refusal
from nnsight_engine.sandbox.restricted.names import names_in

_MOST_BY_PLACE: Final = 2
_MAX_LENGTH: Final = 2**20
_MAX_MULTIPLE: Final = 1024
_TOKEN: Final = 512
"""Bytes that a token may take, in Python's lists, with its mask and its place."""
_OPTIONS: Final = names_in(
    """
    text text_pair token_ids ids tokens add_special_tokens padding truncation max_length padding_side
    return_tensors return_attention_mask return_token_type_ids return_offsets_mapping return_length
    return_special_tokens_mask is_split_into_words skip_special_tokens clean_up_tokenization_spaces
    pad_to_multiple_of sequences
    """
)


class Tokenizing:
    """A method of a tokenizer; the guards charge for what it makes."""

    __slots__ = ("_guards", "_name", "_tokenizer")

    def __init__(self, guards: Any, tokenizer: Any, name: str) -> None:
        """Stand for ``tokenizer.name``."""
        self._guards = guards
        self._tokenizer = tokenizer
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Do what the tokenizer does.

        Raises:
            SandboxError: An argument is none for code.
            Stop: There are not so many bytes left.
        """
        if len(args) > _MOST_BY_PLACE:
            raise refusal(
                f"more than {_MOST_BY_PLACE} arguments of the tokenizer by place", "give them by name"
            )
        for name in kwargs.keys() - _OPTIONS:
            raise refusal(f"the argument `{name}` of the tokenizer")
        meter = self._guards.meter
        args = tuple(plain(one, meter) for one in args)
        kwargs = {name: plain(one, meter) for name, one in kwargs.items()}
        meter.charge(_TOKEN * self._num_tokens(args, kwargs))
        return self._guards.counted(copied(getattr(self._tokenizer, self._name)(*args, **kwargs)))

    def _num_tokens(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Return how many tokens there may be: of the longest text for each if they are padded."""
        length = kwargs.get("max_length") or 0
        multiple = kwargs.get("pad_to_multiple_of") or 1
        if (
            type(length) is not int
            or type(multiple) is not int
            or length > _MAX_LENGTH
            or multiple > _MAX_MULTIPLE
        ):
            raise refusal(
                "such a `max_length` or `pad_to_multiple_of`",
                f"they may be {_MAX_LENGTH:,} and {_MAX_MULTIPLE:,}",
            )
        num, longest, total = _texts([*args, *kwargs.values()])
        padded = kwargs.get("padding") not in {None, False, "do_not_pad"}
        return num * (max(longest, length) + multiple) if padded else total + num


def _texts(values: Any) -> tuple[int, int, int]:
    """Return how many texts there are in lists, how long the longest is, and all together."""
    num, longest, total = 1, 1, 0
    for value in values:
        if isinstance(value, list | tuple):
            below, length, sum_below = _texts(value)
            num, longest, total = num + below, max(longest, length, len(value)), total + sum_below
        else:
            length = len(value) if isinstance(value, str) else int(getattr(value, "nbytes", 1))
            num, longest, total = num + isinstance(value, str), max(longest, length), total + length
    return num, longest, total


def copied(value: Any) -> Any:
    """Return a value of the tokenizer's that is not its own."""
    return type(value)(value) if type(value) in {list, dict, set} else value
