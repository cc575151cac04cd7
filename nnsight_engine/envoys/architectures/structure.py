"""The parts of a transformers model of no table, by the conventions that its models share.

A decoder has a list of as many blocks as its config says, then a norm; blocks take the residual stream first
and return it, alone or first in a tuple.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from nnsight_engine.families.transformers_family import TransformersFamily

if TYPE_CHECKING:
    from collections.abc import Iterator

_SEVERAL_STREAMS: Final = "altup_projections"
"""Child of decoders whose blocks pass several streams on at once, as Gemma 3n's do."""


def family_by_structure(module: torch.nn.Module) -> TransformersFamily | None:
    """Return the parts of a ``PreTrainedModel`` that is a decoder; None if its structure is another one."""
    config: Any = module.config
    num_layers = getattr(config.get_text_config(), "num_hidden_layers", None)
    for path, decoder in _containers(module):
        children = list(decoder.named_children())
        lists = [
            index
            for index, (_, child) in enumerate(children)
            if isinstance(child, torch.nn.ModuleList) and len(child) == num_layers
        ]
        if len(lists) != 1 or hasattr(decoder, _SEVERAL_STREAMS):
            continue
        after = children[lists[0] + 1 :]
        norm = next((name for name, child in after if type(child).__name__.endswith("Norm")), "")
        return TransformersFamily(
            model_types=(config.model_type,),
            bodies=(path,),
            layers=children[lists[0]][0],
            norm=norm,
            embed="",
            attention="",
            mlp="",
            leaves={},
        )
    return None


def _containers(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    decoder: Any = module.get_decoder() if hasattr(module, "get_decoder") else module  # type: ignore[operator]
    paths = {id(one): path for path, one in module.named_modules()}
    for one in (decoder, getattr(module, "base_model", module), module, *module.children()):
        if id(one) in paths:
            yield paths[id(one)], one


__all__ = ["family_by_structure"]
