"""``model.points``: the standard points of a model, by name.

``model.points["layers.3.attn.heads"]`` is the same place on every architecture, with the name and meaning
that the server gives it. Inside a trace, reading waits for the value, and assigning replaces it; values have
``[batch, tokens]`` before the shape that ``model.points()`` lists. ``NNsight`` creates one for each model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from nnsight_engine.core import leaves as leaf_names
from nnsight_engine.envoys.architectures.architecture import input_width, missing_for
from nnsight_engine.envoys.architectures.errors import NoStandardPointsError
from nnsight_engine.envoys.architectures.expert_points import ExpertIdsPoint, ExpertWeightsPoint
from nnsight_engine.envoys.architectures.module_points import (
    CopiedInputPoint,
    FlattenedPoint,
    LogitsPoint,
    ModulePoint,
    PointAccess,
    TokenShape,
)
from nnsight_engine.envoys.architectures.named_points import EMBED, LOGITS, NORM, NamedPoints
from nnsight_engine.envoys.architectures.pattern import PatternPoint
from nnsight_engine.envoys.architectures.routing import expert_weights
from nnsight_engine.envoys.architectures.views import WHOLE

if TYPE_CHECKING:
    from nnsight_engine.envoys.architectures.architecture import Architecture
    from nnsight_engine.envoys.envoy import Envoy
    from nnsight_engine.families.places import Side

_PER_HEAD: Final = {leaf_names.QUERIES, leaf_names.KEYS, leaf_names.VALUES, leaf_names.HEADS}
_PER_NEURON: Final = {"mlp.gate", "mlp.up", leaf_names.NEURONS}


class Points(NamedPoints):
    """The standard points of one model. Calling it lists them, indexing reads and writes.

    Attributes:
        architecture: The architecture that has the points; None if the model has none.
    """

    def __init__(self, root: Envoy, architecture: Architecture | None) -> None:
        """Offer the points of ``architecture``; without one, access raises NoStandardPointsError."""
        super().__init__()
        self._root = root
        self.architecture = architecture
        self._tokens = TokenShape()

    def __contains__(self, name: object) -> bool:
        """Return whether there is a point of that name."""
        return self.architecture is not None and super().__contains__(name)

    def __repr__(self) -> str:
        """List the points, those of all layers in one line per leaf."""
        if self.architecture is None:
            return f"no standard points: {missing_for(self._root._module)}"
        return super().__repr__()

    def layer_of(self, envoy: Envoy) -> int:
        """Return the number of the layer that ``envoy`` is or is in."""
        layers = f"{self._root.path}.{self._known().path(self._known().family.layers)}."
        return int(str(envoy.path).removeprefix(layers).partition(".")[0])

    # Runs.

    def before_run(self) -> None:
        """Prepare for a run of the model: watch the values that are needed from its start."""
        architecture = self.architecture
        if architecture is not None and any(map(architecture.has, architecture.family.flattened)):
            self._tokens.shape = None
            layers = [self._envoy(architecture.layer_path(index)) for index in range(architecture.num_layers)]
            self._root.interleaver.watch(self._tokens, [f"{layer.path}.input" for layer in layers])

    def after_run(self) -> None:
        """Restore the model after the run."""
        for point in self._points.values():
            if isinstance(point, PatternPoint):
                point.release()

    # Lookup.

    def _known(self) -> Architecture:
        if self.architecture is None:
            module = self._root._module
            raise NoStandardPointsError(
                f"{type(module).__name__} has no standard points: {missing_for(module)}. Use the paths of "
                "its own modules, which print(model) shows."
            )
        return self.architecture

    def _num_layers(self) -> int:
        return self._known().num_layers

    def _leaves(self, layer: int) -> list[str]:
        leaves = self._known().leaves[layer]
        has_pattern = leaf_names.HEADS in leaves and self._known().family.has_pattern
        order = self._known().family.order
        return [leaf for leaf in order if leaf in leaves or (leaf == leaf_names.PATTERN and has_pattern)]

    def _points_before_layers(self) -> list[str]:
        self._known()
        return [EMBED]

    def _points_after_layers(self) -> list[str]:
        has = {NORM: self._known().has_norm, LOGITS: self._known().has_logits}
        return [name for name, is_there in has.items() if is_there]

    def _found(self, name: str) -> PointAccess:
        architecture = self._known()
        if name == EMBED:
            return self._module_point(name, architecture.layer_path(0), "input")
        if name == NORM and architecture.has_norm:
            return self._module_point(name, architecture.path(architecture.family.norm), "output")
        if name == LOGITS and architecture.has_logits:
            return LogitsPoint(self._root, (self._config().vocab_size,))
        layer, leaf = self._parsed(name)
        place = architecture.leaves[layer].get(leaf)
        if leaf == leaf_names.PATTERN and place is None:
            attention = self._envoy(architecture.layer_path(layer, architecture.family.attention))
            heads = architecture.leaves[layer].get(leaf_names.HEADS)
            if heads is None or not architecture.family.has_pattern:
                raise self._unknown(name)
            out = self._envoy(architecture.layer_path(layer, heads.path))
            return PatternPoint(name, attention, out, architecture.num_heads)
        if place is None:
            raise self._unknown(name)
        envoy = self._envoy(architecture.layer_path(layer, place.path))
        if place.operation:
            envoy = getattr(envoy.source, place.operation)
        if leaf in architecture.family.flattened:
            return self._flattened(name, envoy, place.side, layer, leaf)
        is_stream = leaf == "mlp.input" and architecture.family.has_norms_last
        kind = CopiedInputPoint if is_stream else ModulePoint
        is_pattern = leaf == leaf_names.PATTERN
        shape = (architecture.num_heads, -1) if is_pattern else self._shape(layer, leaf)
        return kind(name, envoy, place.side, architecture.view(layer, leaf), shape)

    def _flattened(self, name: str, envoy: Envoy, side: Side, layer: int, leaf: str) -> FlattenedPoint:
        shape = self._shape(layer, leaf)
        if leaf in {leaf_names.EXPERTS, leaf_names.EXPERT_WEIGHTS}:
            kind = ExpertIdsPoint if leaf == leaf_names.EXPERTS else ExpertWeightsPoint
            order = self._known().family.router_order
            return kind(name, envoy, side, self._tokens, shape, expert_weights(self._config()), order)
        return FlattenedPoint(name, envoy, side, self._tokens, shape)

    def _module_point(self, name: str, path: str, side: Side) -> ModulePoint:
        return ModulePoint(name, self._envoy(path), side, WHOLE, (self._config().hidden_size,))

    def _envoy(self, path: str) -> Envoy:
        envoy: Envoy = self._root.get(f"{self._root.path}.{path}")
        return envoy

    def _config(self) -> Any:
        config: Any = self._root._module.config
        return config.get_text_config()

    def _shape(self, layer: int, leaf: str) -> tuple[int, ...]:
        """Return the shape of one position's value of a leaf that a module provides."""
        architecture = self._known()
        if leaf in _PER_HEAD:
            num_heads = (
                architecture.num_kv_heads
                if leaf in {leaf_names.KEYS, leaf_names.VALUES}
                else architecture.num_heads
            )
            return (num_heads, self._input_width(layer, leaf_names.HEADS) // architecture.num_heads)
        if leaf == leaf_names.ROUTER:
            path = architecture.layer_path(layer, architecture.leaves[layer][leaf].path)
            router: Any = self._envoy(path)._module
            return (router.weight.shape[0],)
        if leaf in {leaf_names.EXPERTS, leaf_names.EXPERT_WEIGHTS}:
            return (self._config().num_experts_per_tok,)
        if leaf == leaf_names.LATENT:
            return (self._config().kv_lora_rank,)
        if leaf in _PER_NEURON:
            return (self._input_width(layer, leaf_names.NEURONS),)
        return (self._config().hidden_size,)

    def _input_width(self, layer: int, leaf: str) -> int:
        """Return the width of a projection's input from its module; not all configs state it."""
        path = self._known().layer_path(layer, self._known().leaves[layer][leaf].path)
        return input_width(self._envoy(path)._module)
