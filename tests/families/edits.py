"""Transformers with one value edited: the measure for what the engine's writes do.

Ordinary forward hooks at the places that ``reference`` reads from. Greedy continuations are
computed without a cache, so that every position is computed under the edit at every step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol
from unittest import mock

import torch
from torch import nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from tests.families.experts import force
from tests.families.reference import (
    EXPERTS,
    GATED,
    ROUTER,
    WEIGHTS,
    chosen,
    splitter,
    with_choice,
    without_gates,
)
from tests.families.trees import Tree, tree_of

Change = Callable[[torch.Tensor], None]
"""Changes rows ``[..., *leaf shape]`` in place, all positions alike."""


@dataclasses.dataclass(frozen=True, slots=True)
class Continuation:
    """A greedy continuation.

    Attributes:
        token_ids: The tokens chosen.
        logits: What each was chosen from, float32 ``[tokens, vocabulary]``.
    """

    token_ids: list[int]
    logits: torch.Tensor


def add(vector: torch.Tensor) -> Change:
    """Return the change that adds a vector, flat over the leaf's shape."""

    def change(rows: torch.Tensor) -> None:
        is_split = rows.shape[-1] != vector.numel()
        rows.add_(vector.view(rows.shape[1:]) if is_split else vector)

    return change


def set_to(values: list[int]) -> Change:
    """Return the change that sets every row to the same values."""

    def change(rows: torch.Tensor) -> None:
        rows[...] = torch.tensor(values, dtype=rows.dtype)

    return change


def zero(units: list[int]) -> Change:
    """Return the change that sets some units to zero."""

    def change(rows: torch.Tensor) -> None:
        rows[..., units] = 0

    return change


def continued(model: nn.Module, prompt_ids: Sequence[int], num_tokens: int) -> Continuation:
    """Continue a prompt greedily, without a cache."""
    ids = list(prompt_ids)
    for _ in range(num_tokens):
        with torch.no_grad():
            logits = model(torch.tensor([ids]), use_cache=False).logits[0].float()
        ids.append(int(logits[-1].argmax()))
    return Continuation(ids[len(prompt_ids) :], logits[len(prompt_ids) - 1 :])


class Edit(Protocol):
    """An edit in place."""

    def remove(self) -> None:
        """End it."""


def place(model: nn.Module, point: str, change: Change) -> Edit:
    """Edit a point of a model that ``load_reference_model`` returned, until the handle is removed.

    Args:
        model: The model.
        point: ``embed.output``, ``norm.output`` or a point of a layer.
        change: What to do there.
    """
    config: Any = model.config
    tree = tree_of(config)
    blocks = list(model.get_submodule(tree.layers).children())
    if point == "embed.output":
        return _before(blocks[0], change)
    if point == "norm.output":
        return _after(model.get_submodule(tree.norm), change)
    _, layer, leaf = point.split(".", 2)
    block = blocks[int(layer)]
    if leaf == ROUTER:
        return _routed(block.get_submodule(tree.router), change)
    if leaf == EXPERTS:
        return force(block, tree, config, change)
    if leaf == WEIGHTS:
        return _weighted(block, tree, config, change)
    if leaf == "output":
        return _after(block, change)
    inputs = tree.inputs_of(dict(block.named_modules()))
    if leaf in inputs:
        return _before(block.get_submodule(inputs[leaf]), change)
    leaves, paths = next(entry for entry in tree.outputs.items() if leaf in entry[0].split("|"))
    names = leaves.split("|")
    split = splitter(config, len(names))

    def change_part(rows: torch.Tensor) -> None:
        # Parts are views, so the whole changes with them.
        change(split(rows.view(-1, rows.shape[-1]))[names.index(leaf)])

    if leaf == "attn.q" and config.model_type in GATED:
        change = _of_queries(change, config)
    (path,) = set(paths.split("|")) & {name for name, _ in block.named_modules()}
    return _after(block.get_submodule(path), change_part if len(names) > 1 else change)


def _of_queries(change: Change, config: Any) -> Change:
    """Return the change of queries in what a projection with gates returns."""

    def change_queries(rows: torch.Tensor) -> None:
        queries = without_gates(rows, config)
        changed = queries.flatten(-2)
        change(changed)
        queries.copy_(changed.view(queries.shape))

    return change_queries


def _before(module: nn.Module, change: Change) -> RemovableHandle:
    def edit(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        value = (args[0] if args else kwargs["hidden_states"]).clone()
        change(value)
        return ((value, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": value})

    return module.register_forward_pre_hook(edit, with_kwargs=True)


@dataclasses.dataclass(frozen=True, slots=True)
class _EditedForward:
    module: nn.Module

    def remove(self) -> None:
        """Restore the module's own ``forward``."""
        del self.module.forward


def _routed(router: nn.Module, change: Change) -> Edit:
    """Edit the logits inside a router, which chooses experts by them before it returns."""
    linear, forward = functional.linear, router.forward

    def changed(*args: Any, **kwargs: Any) -> torch.Tensor:
        value = linear(*args, **kwargs)
        change(value)
        return value

    def edited(*args: Any, **kwargs: Any) -> Any:
        with mock.patch.object(functional, "linear", changed):
            return forward(*args, **kwargs)

    router.forward = edited
    return _EditedForward(router)


def _weighted(block: nn.Module, tree: Tree, config: Any, change: Change) -> Edit:
    """Edit the weights that a router returns, by weight."""

    def edit(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        _, weights, ids = chosen(output, tree, config)
        change(weights)
        return with_choice(output, tree, weights, ids)

    return block.get_submodule(tree.router).register_forward_hook(edit)


def _after(module: nn.Module, change: Change) -> RemovableHandle:
    def edit(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        value = (output[0] if isinstance(output, tuple) else output).clone()
        change(value)
        return (value, *output[1:]) if isinstance(output, tuple) else value

    return module.register_forward_hook(edit)
