"""Rows of tokens: converts the inputs of language models to tensors of one length.

Padding does not affect the model: it is masked, and positions count from a row's first real token. Models
that derive positions from the mask are left to do so. All other arguments must be the same for all invokes of
a trace, because a single run serves them all.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from transformers import PreTrainedTokenizerBase


def join_shared(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of the whole run; ValueError if a later invoke changes one."""
    for name, value in second.items():
        if name not in first or not _is_equal(first[name], value):
            so_far = repr(first[name]) if name in first else "not given"
            raise ValueError(
                f"{name} applies to all invokes together, which share one run: it was {so_far}, and this "
                f"invoke has {value!r}. Pass it to the trace, or to the first invoke only, or use two traces."
            )
    return first


def without_input(kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any], int]:
    """Return the arguments of an empty invoke, with 0 rows; ValueError if it has any."""
    if kwargs:
        raise ValueError(
            "an invoke without an input sees the rows of all others and runs nothing that could take "
            f"{', '.join(kwargs)}; give arguments to the trace, or to an invoke with an input"
        )
    return (), {}, 0


def _is_equal(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor) or isinstance(second, torch.Tensor):
        is_pair = isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor)
        return is_pair and torch.equal(first, second)
    return first is second or bool(first == second)


Rows: TypeAlias = dict[str, torch.Tensor]
"""Tensors by the model's argument; the first dimension is the rows, the second the tokens."""

IGNORED_LABEL: Final = -100
"""The label that losses ignore."""

TOKEN_INPUTS: Final = ("input_ids", "inputs_embeds")
"""Arguments either of which provides the rows."""

_TOKEN_IDS: Final = ("input_ids", "decoder_input_ids")
_TEXT: Final = ("input_ids", "decoder_input_ids", "labels")
_FILLED_WITH: Final = {
    "inputs_embeds": 0,
    "attention_mask": 0,
    "token_type_ids": 0,
    "mm_token_type_ids": 0,
    "position_ids": 0,
    "decoder_attention_mask": 0,
    "labels": IGNORED_LABEL,
}
ROW_INPUTS: Final = frozenset({*_FILLED_WITH, *_TOKEN_IDS})
"""Arguments with one row per row of the batch, and one column per token."""


@dataclass(frozen=True)
class Filling:
    """How short rows are padded: on the ``left`` or ``right``, with any token, since it is masked."""

    token: int
    side: str

    def stack(self, name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Pad the rows of all parts, each ``[num_rows, num_tokens, ...]``, and stack them to one tensor."""
        width = max(part.shape[1] for part in parts)
        return torch.cat([self._widened(name, part, width) for part in parts])

    def _widened(self, name: str, rows: torch.Tensor, width: int) -> torch.Tensor:
        """Pad rows to ``width`` tokens; the name of the argument determines the value."""
        num_missing = width - rows.shape[1]
        if not num_missing:
            return rows
        value = self.token if name in _TOKEN_IDS else _FILLED_WITH[name]
        filled = rows.new_full((rows.shape[0], num_missing, *rows.shape[2:]), value)
        return torch.cat([filled, rows] if self.side == "left" else [rows, filled], dim=1)


def filling_of(tokenizer: PreTrainedTokenizerBase) -> Filling:
    tokens = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return Filling(next(token for token in tokens if token is not None), tokenizer.padding_side)


def read_rows(tokenizer: PreTrainedTokenizerBase, fields: dict[str, Any]) -> dict[str, Any]:
    """Return a model's arguments, with rows as tensors of one length and with an attention mask.

    Tokens and labels may be text, token ids, a list of either, or a tensor ``[num_tokens]`` or
    ``[num_rows, num_tokens]``. Other types raise TypeError, no tokens ValueError.
    """
    filling = filling_of(tokenizer)
    lengths: list[torch.Tensor] = []
    arguments: dict[str, Any] = {}
    for name, value in _encoded(tokenizer, fields).items():
        if name not in ROW_INPUTS:
            arguments[name] = value
        elif value is not None:
            parts = _parts(name, value)
            arguments[name] = filling.stack(name, parts)
            if name in TOKEN_INPUTS:
                lengths = [torch.ones(part.shape[:2], dtype=torch.long, device=part.device) for part in parts]
    if not lengths and "input_ids" in fields:  # None is the argument's absence where embeddings are given
        raise _no_tokens_error("input_ids", None)
    if not lengths:
        raise ValueError(
            f"a language model's input needs input_ids or inputs_embeds, got {', '.join(fields)}"
        )
    if "attention_mask" not in arguments:
        arguments["attention_mask"] = filling.stack("attention_mask", lengths)
    return arguments


def _encoded(tokenizer: PreTrainedTokenizerBase, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields with token ids for texts, and what the tokenizer returns beside those."""
    texts = {name: _texts(fields[name]) for name in _TEXT if name in fields}
    encoded = {name: tokenizer(texts) for name, texts in texts.items() if texts}
    beside = dict(encoded["input_ids"]) if "input_ids" in encoded else {}
    return {**beside, **fields, **{name: tokens["input_ids"] for name, tokens in encoded.items()}}


def _texts(value: Any) -> list[str]:
    """Return a text, or several, as a list; an empty one for any other value."""
    if isinstance(value, str):
        return [value]
    is_list = isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)
    return list(value) if is_list else []


def read_ids(value: Any) -> list[torch.Tensor]:
    """Return token ids in the forms of ``read_rows``, except text, as tensors ``[num_rows, num_tokens]``."""
    return _parts("input_ids", value)


def _parts(name: str, value: Any) -> list[torch.Tensor]:
    """Return an argument's rows as tensors ``[rows, tokens, ...]``, of several lengths if it was a list."""
    if isinstance(value, list | tuple) and value and _is_row(value[0]):
        return [part for item in value for part in _parts(name, item)]
    if isinstance(value, int | float | None):
        raise _no_tokens_error(name, value)
    tensor = value if isinstance(value, torch.Tensor) else _as_tensor(name, value)
    num_dims = 3 if name == "inputs_embeds" else 2
    if tensor.ndim == num_dims - 1:
        tensor = tensor.unsqueeze(0)
    if tensor.ndim < num_dims or not tensor.shape[0] or not tensor.shape[1]:
        raise ValueError(
            f"{name} must have at least one row and one token, got shape {tuple(tensor.shape)}; "
            "for an empty text, pass the token that texts begin with"
        )
    if name in _TOKEN_IDS and tensor.ndim > num_dims:
        raise ValueError(f"{name} must be [tokens] or [rows, tokens], got shape {tuple(tensor.shape)}")
    if name in _TOKEN_IDS and (tensor.is_floating_point() or tensor.dtype == torch.bool):
        raise TypeError(
            f"{name} must be whole numbers, got {tensor.dtype}; pass embeddings as inputs_embeds="
        )
    return [tensor]


def _is_row(item: Any) -> bool:
    return isinstance(item, Sequence) or getattr(item, "ndim", 0) > 0


def _as_tensor(name: str, value: Any) -> torch.Tensor:
    """Return lists as a tensor; an empty one is of integers too."""
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise _no_tokens_error(name, value) from error
    return tensor if tensor.numel() else tensor.long()


def _no_tokens_error(name: str, value: Any) -> TypeError:
    return TypeError(
        f"{name} must be text, token ids, a list or tensor of them, or what a tokenizer returns, "
        f"got {value!r}"
    )


def join_rows(filling: Filling, first: Rows, second: Rows) -> Rows:
    """Return the rows of both, padded to the longest; ValueError if an argument has no default."""
    joined: Rows = {}
    for name in {**first, **second}:
        parts = [rows[name] if name in rows else _default(name, rows) for rows in (first, second)]
        joined[name] = filling.stack(name, [parts[0], parts[1].to(parts[0].device)])
    return joined


def _default(name: str, rows: Rows) -> torch.Tensor:
    """Return the rows of an invoke that lacks an argument; ValueError if it has no default."""
    mask = rows["attention_mask"]
    if name == "position_ids":
        return positions(mask)
    if name in {"labels", "token_type_ids", "mm_token_type_ids"}:
        return torch.full_like(mask, _FILLED_WITH[name], dtype=torch.long)
    raise ValueError(f"one invoke has {name} and another has not; give it to all of them or to none")


def counts_positions(module: torch.nn.Module) -> bool:
    """Return whether the model takes ``position_ids`` that count each row's tokens from 0.

    RoBERTa, whose first position is not 0, and vision models (three dimensions) compute their own.
    """
    if getattr(getattr(module, "config", None), "is_encoder_decoder", False):
        return False
    methods = ("create_position_ids_from_input_ids", "get_rope_index")
    if any(hasattr(submodule, name) for submodule in module.modules() for name in methods):
        return False
    # Inspect the class: accelerate replaces the method on the instance.
    return "position_ids" in inspect.signature(type(module).forward).parameters


def positions(mask: torch.Tensor) -> torch.Tensor:
    """Return the position of each token in its row, ``[num_rows, num_tokens]``; 0 where it is masked."""
    counted = mask.long().cumsum(-1) - 1
    return counted.masked_fill(mask == 0, 0)


def filled_left(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with rows padded on the left: generation continues after the last column."""
    mask = arguments.get("attention_mask")
    if not isinstance(mask, torch.Tensor) or mask.ndim != 2:
        return arguments
    num_filled = (mask.flip(1).cumsum(1) == 0).sum(1).tolist()
    if not any(num_filled):
        return arguments
    moved = dict(arguments)
    for name in ROW_INPUTS & arguments.keys():
        rows = arguments[name]
        if isinstance(rows, torch.Tensor) and rows.shape[:2] == mask.shape:
            moved[name] = torch.stack(
                [row.roll(num_columns, 0) for row, num_columns in zip(rows, num_filled, strict=True)]
            )
    return moved
