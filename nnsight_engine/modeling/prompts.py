"""Inputs of a diffusion model: prompts for the pipeline or tensors for the denoiser, one row each."""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import torch

from nnsight_engine.modeling.invokes import InvokesDifferError, join_shared

Prepared: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""

INPUTS: Final = ("prompt", "prompt_embeds", "batch_size", "sample", "hidden_states")
"""Arguments that determine the number of rows; a pipeline without prompts takes ``batch_size``."""


def count_rows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    for value in (*args[:1], *(kwargs.get(name) for name in INPUTS)):
        if isinstance(value, int):
            return value
        if isinstance(value, torch.Tensor | list | tuple) and len(value):
            return len(value)
        if isinstance(value, str):
            return 1
    raise TypeError(
        f"a diffusion model takes a prompt, prompts or tensors as its input, or {', '.join(INPUTS)} by name"
    )


def as_lists(kwargs: dict[str, Any], num_rows: int) -> dict[str, Any]:
    return {
        name: [value] * num_rows if "prompt" in name and isinstance(value, str) else value
        for name, value in kwargs.items()
    }


def join_arguments(first: Prepared, second: Prepared) -> Prepared:
    if len(first[0]) != len(second[0]):
        raise InvokesDifferError(
            f"each invoke must have as many arguments without a name, got {len(first[0])} "
            f"and {len(second[0])}"
        )
    nums = (count_rows(*first), count_rows(*second))
    args = _join(_numbered(first[0]), _numbered(second[0]), nums)
    return tuple(args.values()), _join(first[1], second[1], nums)


def _numbered(args: tuple[Any, ...]) -> dict[str, Any]:
    return {f"argument {index}": value for index, value in enumerate(args)}


def _join(first: dict[str, Any], second: dict[str, Any], nums: tuple[int, int]) -> dict[str, Any]:
    rows = {
        name: _join_rows(name, first, second, nums)
        for name in {**first, **second}
        if _has_rows(name, first.get(name), nums[0]) or _has_rows(name, second.get(name), nums[1])
    }
    shared = [
        {name: value for name, value in invoke.items() if name not in rows} for invoke in (first, second)
    ]
    joined = {**join_shared(*shared), **rows}
    return {name: joined[name] for name in {**first, **second}}


def _has_rows(name: str, value: Any, num_rows: int) -> bool:
    if name == "batch_size" or ("prompt" in name and isinstance(value, list | tuple)):
        return True
    return isinstance(value, torch.Tensor) and value.ndim > 0 and len(value) % num_rows == 0


def _join_rows(name: str, first: dict[str, Any], second: dict[str, Any], nums: tuple[int, int]) -> Any:
    pair = [invoke.get(name) for invoke in (first, second)]
    if "negative_prompt" in name:
        pair = [[""] * num if value is None else value for value, num in zip(pair, nums, strict=True)]
    before, after = pair
    if (
        isinstance(before, torch.Tensor)
        and isinstance(after, torch.Tensor)
        and before.shape[1:] == after.shape[1:]
    ):
        return torch.cat([before, after.to(before.device)])
    if isinstance(before, int) and isinstance(after, int):
        return before + after
    if isinstance(before, list | tuple) and isinstance(after, list | tuple):
        return [*before, *after]
    raise InvokesDifferError(
        f"every invoke must have {name}, and tensors of one shape, got {_described(before)} "
        f"and {_described(after)}"
    )


def _described(value: Any) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
