"""The standard points of one model and its envoy classes: a family's table resolved against the model.

Invariant: an alias from here never hides an existing name.

A transformers model of no table has its parts by the conventions that such models share: a decoder has a list
of as many blocks as its config says, then a norm; blocks take the residual stream first and return it, alone
or first in a tuple.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import torch

from nnsight_engine.core import model_spec as leaf_names
from nnsight_engine.envoys.architectures import views
from nnsight_engine.envoys.architectures.views import (
    AttentionEnvoy,
    GatedMlpEnvoy,
    MlpEnvoy,
    OneMixerLayerEnvoy,
    SplitMlpLayerEnvoy,
    UpEnvoy,
)
from nnsight_engine.families.layout import Part, Place, TransformersFamily, leaves_in, parts_of, stream_leaves
from nnsight_engine.families.registry import TRANSFORMERS_FAMILIES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nnsight_engine.envoys.envoy import Envoy, EnvoyMap
    from nnsight_engine.envoys.module_options import Rename

_SEVERAL_STREAMS: Final = "altup_projections"
"""Child of decoders whose blocks pass several streams on at once, as Gemma 3n's do."""


def family_by_structure(module: torch.nn.Module) -> TransformersFamily | None:
    """Return the parts of a ``PreTrainedModel``, empty where unknown; None if it is no such decoder."""
    config: Any = module.config
    num_layers = getattr(config.get_text_config(), "num_hidden_layers", None)
    for path, decoder in _containers(module):
        children = list(decoder.named_children())
        indices = [
            index
            for index, (_, child) in enumerate(children)
            if isinstance(child, torch.nn.ModuleList) and len(child) == num_layers
        ]
        if len(indices) != 1 or hasattr(decoder, _SEVERAL_STREAMS):
            continue
        children_after = children[indices[0] + 1 :]
        norm = next((name for name, child in children_after if type(child).__name__.endswith("Norm")), "")
        return TransformersFamily(
            model_types=(config.model_type,),
            bodies=(path,),
            layers=children[indices[0]][0],
            norm=norm,
            embed="",
            attention="",
            mlp="",
            leaves={},
        )
    return None


def _containers(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the modules that may contain the list of blocks, with their paths, the likeliest first."""
    decoder: Any = module.get_decoder() if hasattr(module, "get_decoder") else module  # type: ignore[operator]
    paths = {id(submodule): path for path, submodule in module.named_modules()}
    for submodule in (decoder, getattr(module, "base_model", module), module, *module.children()):
        if id(submodule) in paths:
            yield paths[id(submodule)], submodule


_HEADS_OF_MODELS: Final = ("lm_head", "embed_out")
_QKV: Final = ("q", "k", "v")
_PROJECTED: Final = (leaf_names.QUERIES, leaf_names.KEYS, leaf_names.VALUES)


@dataclasses.dataclass(frozen=True, slots=True)
class Architecture:
    """A family's table resolved against one model.

    Attributes:
        body: Path of the decoder, empty for the model itself.
        leaves: Location of each leaf of each layer, except ``attn.pattern``; layers of one model may differ.
        has_logits: Whether the model itself returns logits of tokens.
        num_encoder_layers: Number of blocks of the vision encoder; 0 if their place is not known.
    """

    family: TransformersFamily
    body: str
    leaves: tuple[Mapping[str, Place], ...]
    num_heads: int
    num_kv_heads: tuple[int, ...]
    has_norm: bool
    has_logits: bool
    rename: Mapping[str, str]
    envoys: Mapping[type[torch.nn.Module], type[Envoy]]
    num_encoder_layers: int = 0

    @property
    def num_layers(self) -> int:
        return len(self.leaves)

    def has(self, leaf: str) -> bool:
        return any(leaf in leaves for leaves in self.leaves)

    def path(self, below_body: str) -> str:
        return f"{self.body}.{below_body}" if self.body else below_body

    def layer_path(self, layer: int, below: str = "") -> str:
        path = self.path(f"{self.family.layers}.{layer}")
        return f"{path}.{below}" if below else path

    def counterpart(self, name: str) -> tuple[str, str] | None:
        """Return the path and the standard name of what other families call ``name``; None if unknown."""
        paths_here = {"layers": self.family.layers, "norm": self.family.norm, "embed": self.family.embed}
        name_here = next(
            (
                standard_name
                for standard_name in paths_here
                if name in _names_in_families()[standard_name] and paths_here[standard_name]
            ),
            None,
        )
        return None if name_here is None else (self.path(paths_here[name_here]), name_here)

    def has_pattern(self, layer: int) -> bool:
        """Return whether a layer's attention probabilities are a point: those of its own queries and keys."""
        leaves = self.leaves[layer]
        return self.family.has_pattern and leaf_names.HEADS in leaves and leaf_names.KEYS in leaves

    def view(self, layer: int, leaf: str) -> views.View:
        """Return how a leaf's value is viewed in its module's tensor: by heads, as a part, or as a whole."""
        place, num_kv_heads = self.leaves[layer][leaf], self.num_kv_heads[layer]
        if place.part:
            return self._view_of_part(place.part, num_kv_heads)
        if leaf == leaf_names.QUERIES and self.family.has_query_gates:
            return views.before_gates(self.num_heads)
        if place.side == "input" and leaf in _PROJECTED:
            return views.WHOLE  # a norm of each head receives them
        num_heads = {
            leaf_names.QUERIES: self.num_heads,
            leaf_names.KEYS: num_kv_heads,
            leaf_names.VALUES: num_kv_heads,
            leaf_names.HEADS: self.num_heads,
        }.get(leaf)
        if num_heads is not None:
            return views.heads(num_heads)
        return views.COPY if leaf in self.family.changed_in_place else views.WHOLE

    def _view_of_part(self, part: Part, num_kv_heads: int) -> views.View:
        """Return the view of one of several projections that the module computes as one tensor."""
        if part not in _QKV:
            return views.half(("gate", "up").index(part))
        index = _QKV.index(part)
        if self.family.is_qkv_per_head:
            return views.fused_per_head(index, self.num_heads, num_kv_heads)
        return views.fused_heads(index, (self.num_heads, num_kv_heads, num_kv_heads))

    def rename_with(self, user_names: Rename | None, owner: type) -> Rename:
        """Add the user's aliases, which take precedence; attributes of ``owner``, the root's class, stay."""
        user_names = user_names or {}
        merged = {
            path: list(names) if isinstance(names, (list, tuple)) else [names]
            for path, names in user_names.items()
        }
        taken = {str(name).removeprefix(".") for names in merged.values() for name in names}
        for path, name in self.rename.items():
            if name not in taken and not hasattr(owner, name):
                merged.setdefault(path, []).append(name)
        return merged

    def envoys_with(self, user_classes: EnvoyMap) -> EnvoyMap:
        """Add the user's envoy classes; a single class for all modules is kept as it is."""
        if isinstance(user_classes, type):
            return user_classes
        user_classes = user_classes or {}
        ours: dict[type[torch.nn.Module] | str, type[Envoy]] = {
            module_class: envoy_class
            for module_class, envoy_class in self.envoys.items()
            if not any(base in user_classes for base in module_class.__mro__)
        }
        return {**ours, **user_classes}


def architecture_of(module: torch.nn.Module) -> Architecture | None:
    """Return the architecture of a decoder of transformers, by table or structure; None for other modules."""
    if not _is_from_transformers(module):
        return None
    config: Any = module.config
    family = TRANSFORMERS_FAMILIES.get(config.model_type) or family_by_structure(module)
    if family is None:
        return None
    body = next((body for body in family.bodies if _layers(module, body, family) is not None), None)
    layers = None if body is None else _layers(module, body, family)
    if body is None or layers is None:
        return None
    text: Any = config.get_text_config()
    decoder = module.get_submodule(body)
    num_heads = getattr(text, "num_attention_heads", 0)  # a model without attention states none
    leaves = tuple(_leaves_of(layer, family) for layer in layers)
    return Architecture(
        family=family,
        body=body,
        leaves=leaves,
        num_heads=num_heads,
        num_kv_heads=tuple(
            _num_kv_heads(text, index) or _projected_kv_heads(layer, leaves[index], num_heads)
            for index, layer in enumerate(layers)
        ),
        has_norm=bool(family.norm) and getattr(decoder, family.norm) is not None,
        has_logits=any(hasattr(module, name) for name in _HEADS_OF_MODELS),
        rename=_rename(module, body, family, layers),
        envoys={
            kind: envoy
            for layer, layer_leaves in zip(layers, leaves, strict=True)
            for kind, envoy in _envoys(layer, family, layer_leaves).items()
        },
        num_encoder_layers=len(list(module.get_submodule(family.encoder).children()))
        if family.encoder
        else 0,
    )


def _num_kv_heads(text: Any, layer: int) -> int | None:
    of_layer = text.per_layer_config[layer] if hasattr(text, "per_layer_config") else text
    return getattr(of_layer, "num_key_value_heads", None)


def missing_for(module: torch.nn.Module) -> str:
    """Return the reason why a module has no standard points, for an error message."""
    if not _is_from_transformers(module):
        return "it is not a model of the transformers library"
    config: Any = module.config
    if config.model_type in TRANSFORMERS_FAMILIES:
        return f"its modules are not at the paths of {config.model_type}"
    return "it has no single list of as many blocks as its config's num_hidden_layers"


def _is_from_transformers(module: torch.nn.Module) -> bool:
    """Check by name, since importing transformers takes seconds, and vLLM's models have similar configs."""
    return any(
        (base.__module__, base.__name__) == ("transformers.modeling_utils", "PreTrainedModel")
        for base in type(module).__mro__
    )


def _layers(module: torch.nn.Module, body: str, family: TransformersFamily) -> torch.nn.ModuleList | None:
    """Return the list of blocks of the decoder at ``body``; None if there is none where the family has it."""
    try:
        layers = module.get_submodule(f"{body}.{family.layers}" if body else family.layers)
    except AttributeError:
        return None
    return layers if isinstance(layers, torch.nn.ModuleList) and len(layers) else None


@functools.cache
def _names_in_families() -> Mapping[str, frozenset[str]]:
    """Return the names that modules of all families have, by the standard name of the module."""
    families = TRANSFORMERS_FAMILIES.values()
    bodies = frozenset(
        path_part
        for family in families
        for body in family.bodies
        for path_part in body.split(".")
        if path_part
    )
    return {
        "layers": bodies | {family.layers for family in families},
        "norm": frozenset(family.norm for family in families),
        "embed": frozenset({"wte", "embed_in", *(family.embed for family in families if family.embed)}),
    }


def _leaves_of(layer: torch.nn.Module, family: TransformersFamily) -> Mapping[str, Place]:
    stream = stream_leaves() if family.has_stream else {}
    return leaves_in(parts_of(layer), {**stream, **family.leaves})


def _projected_kv_heads(layer: torch.nn.Module, leaves: Mapping[str, Place], num_heads: int) -> int:
    """Return the number of KV heads by the width of a fused q, k, v projection, else ``num_heads``."""
    place = leaves.get(leaf_names.KEYS)
    if place is None or not place.part:
        return num_heads
    projection: Any = layer.get_submodule(place.path)
    head_dim = input_width(layer.get_submodule(leaves[leaf_names.HEADS].path)) // num_heads
    width: int = projection.out_features if hasattr(projection, "out_features") else projection.nf
    return (width // head_dim - num_heads) // 2


def input_width(projection: Any) -> int:
    width: int = projection.in_features if hasattr(projection, "in_features") else projection.nx
    return width


def _rename(
    module: torch.nn.Module, body: str, family: TransformersFamily, layers: torch.nn.ModuleList
) -> dict[str, str]:
    """Return the standard names by path, for modules that have other names in this model."""
    names = {"layers": family.layers, "norm": family.norm, "embed": family.embed}
    decoder = module.get_submodule(body)
    renames = {
        f".{body}.{path}" if body else f".{path}": name
        for name, path in names.items()
        if path and getattr(decoder, path, None) is not None and not hasattr(module, name)
    }
    if family.attention == family.mlp:
        return renames  # both are parts of the layer's envoy, or there is neither
    if family.attention and not any(hasattr(layer, "attn") for layer in layers):
        renames[family.attention] = "attn"
    if family.mlp and not any(hasattr(layer, "mlp") for layer in layers):
        renames[family.mlp] = "mlp"
    return renames


def _envoys(
    layer: torch.nn.Module, family: TransformersFamily, leaves: Mapping[str, Place]
) -> dict[type[torch.nn.Module], type[Envoy]]:
    """Return the envoy classes with standard points for the modules of a layer, by their classes."""
    modules = dict(layer.named_modules(remove_duplicate=False))
    classes: dict[type[torch.nn.Module], type[Envoy]] = {}
    if leaf_names.HEADS in leaves:
        classes[type(modules[family.attention])] = AttentionEnvoy
    if family.attention and family.attention == family.mlp:
        classes[type(layer)] = OneMixerLayerEnvoy
    if not family.mlp and "mlp.input" in leaves:
        classes[type(layer)] = SplitMlpLayerEnvoy
        return classes
    if "mlp.up" not in leaves:
        return classes
    mlp = modules[family.mlp]
    if "mlp.gate" in leaves:
        classes[type(mlp)] = GatedMlpEnvoy
    else:
        classes[type(mlp)] = UpEnvoy if hasattr(mlp, "act") else MlpEnvoy
    return classes
