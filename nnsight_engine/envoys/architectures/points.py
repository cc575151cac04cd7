"""``model.points``: the standard points of a model, by name.

Names and meanings are the same on every architecture and on the server. Values have ``[batch, tokens]``
before the shape that ``model.points()`` lists. Recurrent states of mixers are not returned: a transformers
model updates them in place in its cache.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Final, NoReturn

import torch

from api_schemas.points import ENCODER_BLOCK
from nnsight_engine.core import model_spec as leaf_names
from nnsight_engine.envoys.architectures.architecture import input_width, missing_for
from nnsight_engine.envoys.architectures.expert_points import (
    ExpertIdsPoint,
    ExpertWeightsPoint,
    expert_weights,
    num_chosen,
)
from nnsight_engine.envoys.architectures.module_points import (
    CopiedInputPoint,
    EncoderPoint,
    FlattenedPoint,
    LogitsPoint,
    ModulePoint,
    PointAccess,
    TokenShape,
)
from nnsight_engine.envoys.architectures.named_points import (
    EMBED,
    LOGITS,
    NORM,
    NamedPoints,
    NoStandardPointsError,
    StateError,
)
from nnsight_engine.envoys.architectures.pattern import PatternPoint
from nnsight_engine.envoys.architectures.views import WHOLE

if TYPE_CHECKING:
    from nnsight_engine.envoys.architectures.architecture import Architecture
    from nnsight_engine.envoys.envoy import Envoy
    from nnsight_engine.families.layout import Side


class RunningCache:
    """Records the cache with which the mixers of the running step were called; None without one."""

    def __init__(self) -> None:
        self.cache: Any = None

    def add(self, provider: str, iteration: int | None, value: Any) -> None:
        """Record the cache among a mixer's arguments, ``value``; the interleaver calls this at each step."""
        del provider, iteration
        _, kwargs = value
        self.cache = kwargs.get("cache_params")


@dataclasses.dataclass(frozen=True, slots=True)
class StatePoint:
    """The state of one mixer after the last token of a step, ``[batch, heads, head_dim, state_size]``."""

    name: str
    envoy: Envoy
    running: RunningCache
    shape: tuple[int, ...]

    def read(self) -> torch.Tensor:
        """Return a copy of this block's rows once the mixer has returned; StateError without a cache."""
        _ = self.envoy.output
        cache = self.running.cache
        if cache is None:
            raise StateError(
                f"{self.name} is kept in the model's cache only, and this run has none; drop use_cache=False"
            )
        module: Any = self.envoy._module
        state: torch.Tensor = cache.layers[module.layer_idx].recurrent_states[0]
        mediator = self.envoy.interleaver.current
        group = None if mediator is None else mediator.batch_group
        batcher = self.envoy.interleaver.batcher
        if group is not None and not batcher.covers_batch(group):
            state = state.narrow(0, *group)
        return state.clone()

    def write(self, value: torch.Tensor) -> NoReturn:
        del value
        raise StateError.unwritable(self.name)


_PER_HEAD: Final = {leaf_names.QUERIES, leaf_names.KEYS, leaf_names.VALUES, leaf_names.HEADS}
_PER_NEURON: Final = {"mlp.gate", "mlp.up", leaf_names.NEURONS}


class Points(NamedPoints):
    """The standard points of one model. Calling it lists them, indexing reads and writes."""

    def __init__(self, root: Envoy, architecture: Architecture | None) -> None:
        """Offer the points of ``architecture``; without one, access raises NoStandardPointsError."""
        super().__init__()
        self.root = root
        self.architecture = architecture
        self._tokens = TokenShape()
        self._cache = RunningCache()

    def __contains__(self, name: object) -> bool:
        return self.architecture is not None and super().__contains__(name)

    def __repr__(self) -> str:
        if self.architecture is None:
            return f"no standard points: {missing_for(self.root._module)}"
        return super().__repr__()

    def layer_of(self, envoy: Envoy) -> int:
        layers = f"{self.root.path}.{self._supported().path(self._supported().family.layers)}."
        return int(str(envoy.path).removeprefix(layers).partition(".")[0])

    # Runs.

    def before_run(self) -> None:
        """Prepare for a run of the model: watch the values that are needed from its start."""
        architecture = self.architecture
        if architecture is not None and any(map(architecture.has, architecture.family.flattened)):
            self._tokens.shape = None
            layers = [self._envoy(architecture.layer_path(index)) for index in range(architecture.num_layers)]
            self.root.interleaver.watch(self._tokens, [f"{layer.path}.input" for layer in layers])
        if architecture is not None and architecture.has(leaf_names.STATE):
            mixers = [
                self._envoy(architecture.layer_path(index, leaves[leaf_names.STATE].path))
                for index, leaves in enumerate(architecture.leaves)
                if leaf_names.STATE in leaves
            ]
            self.root.interleaver.watch(self._cache, [f"{mixer.path}.input" for mixer in mixers])

    def after_run(self) -> None:
        """Drop the running step's cache, and restore the configs that points of patterns have replaced."""
        self._cache.cache = None
        for point in self._points.values():
            if isinstance(point, PatternPoint):
                point.release()

    # Lookup.

    def _supported(self) -> Architecture:
        """Return the model's architecture; NoStandardPointsError if it has none."""
        if self.architecture is None:
            module = self.root._module
            raise NoStandardPointsError(
                f"{type(module).__name__} has no standard points: {missing_for(module)}. Use the paths of "
                "its own modules, which print(model) shows."
            )
        return self.architecture

    def _num_layers(self) -> int:
        return self._supported().num_layers

    def _num_encoder_layers(self) -> int:
        return self._supported().num_encoder_layers

    def _leaves(self, layer: int) -> list[str]:
        """Return the leaves of a layer, in the order in which the family's models compute them."""
        architecture = self._supported()
        leaves, has_pattern = architecture.leaves[layer], architecture.has_pattern(layer)
        order = architecture.family.order
        return [leaf for leaf in order if leaf in leaves or (leaf == leaf_names.PATTERN and has_pattern)]

    def _points_before_layers(self) -> list[str]:
        return [EMBED] if self._supported().family.has_stream else []

    def _points_after_layers(self) -> list[str]:
        has = {NORM: self._supported().has_norm, LOGITS: self._supported().has_logits}
        return [name for name, is_there in has.items() if is_there]

    def _access_of(self, name: str) -> PointAccess:
        """Create the point of a name; UnknownPointError if the model has no such point."""
        architecture = self._supported()
        if name == EMBED and architecture.family.has_stream:
            return self._module_point(name, architecture.layer_path(0), "input")
        if name == NORM and architecture.has_norm:
            return self._module_point(name, architecture.path(architecture.family.norm), "output")
        if name == LOGITS and architecture.has_logits:
            return LogitsPoint(self.root, (self._config().vocab_size,))
        layer, leaf = self._parsed(name)
        return self._encoder_point(name, layer) if leaf == ENCODER_BLOCK else self._leaf(name, layer, leaf)

    def _encoder_point(self, name: str, layer: int) -> EncoderPoint:
        block = self._envoy(f"{self._supported().family.encoder}.{layer}")
        config: Any = self.root._module.config
        return EncoderPoint(name, block, "output", WHOLE, (config.vision_config.hidden_size,))

    def _leaf(self, name: str, layer: int, leaf: str) -> PointAccess:
        """Create the point of a layer's leaf, at the module where the model's family has it."""
        architecture = self._supported()
        place = architecture.leaves[layer].get(leaf)
        if leaf == leaf_names.PATTERN and place is None:
            if not architecture.has_pattern(layer):
                raise self._unknown(name)
            attention = self._envoy(architecture.layer_path(layer, architecture.family.attention))
            heads = architecture.leaves[layer][leaf_names.HEADS]
            out = self._envoy(architecture.layer_path(layer, heads.path))
            return PatternPoint(name, attention, out, architecture.num_heads)
        if place is None:
            raise self._unknown(name)
        envoy = self._envoy(architecture.layer_path(layer, place.path))
        if place.operation:
            envoy = getattr(envoy.source, place.operation)
        if leaf == leaf_names.STATE:
            return StatePoint(name, envoy, self._cache, self._shape(layer, leaf))
        if leaf in architecture.family.flattened:
            return self._flattened(name, envoy, place.side, layer, leaf)
        is_stream = leaf == "mlp.input" and architecture.family.has_norms_last
        is_shared = place.side == "input" and leaf in {leaf_names.KEYS, leaf_names.VALUES}
        kind = CopiedInputPoint if is_stream or is_shared else ModulePoint
        return kind(name, envoy, place.side, architecture.view(layer, leaf), self._shape(layer, leaf))

    def _flattened(self, name: str, envoy: Envoy, side: Side, layer: int, leaf: str) -> FlattenedPoint:
        """Create the point of a module that gets rows and tokens in one axis, such as a router of experts."""
        shape = self._shape(layer, leaf)
        if leaf in {leaf_names.EXPERTS, leaf_names.EXPERT_WEIGHTS}:
            kind = ExpertIdsPoint if leaf == leaf_names.EXPERTS else ExpertWeightsPoint
            family, weights_of = self._supported().family, expert_weights(self._config())
            order, has_probabilities = family.router_order, family.routes_probabilities
            return kind(name, envoy, side, self._tokens, shape, weights_of, order, has_probabilities)
        return FlattenedPoint(name, envoy, side, self._tokens, shape)

    def _module_point(self, name: str, path: str, side: Side) -> ModulePoint:
        return ModulePoint(name, self._envoy(path), side, WHOLE, (self._config().hidden_size,))

    def _envoy(self, path: str) -> Envoy:
        envoy: Envoy = self.root.get(f"{self.root.path}.{path}")
        return envoy

    def _config(self) -> Any:
        config: Any = self.root._module.config
        return config.get_text_config()

    def _shape(self, layer: int, leaf: str) -> tuple[int, ...]:
        """Return the shape of one position's value, see ``PointAccess``."""
        architecture = self._supported()
        if leaf in _PER_HEAD:
            num_heads = (
                architecture.num_kv_heads[layer]
                if leaf in {leaf_names.KEYS, leaf_names.VALUES}
                else architecture.num_heads
            )
            return (num_heads, self._input_width(layer, leaf_names.HEADS) // architecture.num_heads)
        if leaf == leaf_names.PATTERN:
            return (architecture.num_heads, -1)
        if leaf in {leaf_names.ROUTER, leaf_names.STATE}:
            return self._shape_of_module(layer, leaf)
        return (self._width(layer, leaf),)

    def _width(self, layer: int, leaf: str) -> int:
        """Return the size of a leaf whose value at one position is a vector."""
        config = self._config()
        width: int = config.hidden_size
        if leaf in {leaf_names.EXPERTS, leaf_names.EXPERT_WEIGHTS}:
            width = num_chosen(config)
        elif leaf == leaf_names.LATENT:
            width = config.kv_lora_rank
        elif leaf in _PER_NEURON:
            width = self._input_width(layer, leaf_names.NEURONS)
        return width

    def _shape_of_module(self, layer: int, leaf: str) -> tuple[int, ...]:
        """Return the shape of a router's or a state's value, which its module determines."""
        path = self._supported().layer_path(layer, self._supported().leaves[layer][leaf].path)
        module: Any = self._envoy(path)._module
        if leaf == leaf_names.ROUTER:
            return (module.weight.shape[0],)
        return (module.num_heads, module.head_dim, module.ssm_state_size)

    def _input_width(self, layer: int, leaf: str) -> int:
        path = self._supported().layer_path(layer, self._supported().leaves[layer][leaf].path)
        return input_width(self._envoy(path)._module)
