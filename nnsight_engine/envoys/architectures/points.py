"""``model.points``: the standard points of a model, by name.

``model.points["layers.3.attn.heads"]`` is one place on every architecture, by the name and with the meaning
that the server gives it. Inside a trace, reading waits for the value, and assigning replaces it; values have
``[batch, tokens]`` before the shape that ``model.points()`` lists. ``NNsight`` makes one for each model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import torch

from api_schemas.errors import ApiError
from api_schemas.points import PointPattern
from nnsight_engine.envoys.architectures import table
from nnsight_engine.envoys.architectures.architecture import missing_for
from nnsight_engine.envoys.architectures.errors import NoStandardPointsError, UnknownPointError
from nnsight_engine.envoys.architectures.pattern import PatternPoint
from nnsight_engine.envoys.architectures.places import (
    FlattenedPoint,
    LogitsPoint,
    ModulePoint,
    Point,
    TokenShape,
)
from nnsight_engine.envoys.architectures.views import WHOLE

if TYPE_CHECKING:
    from nnsight_engine.envoys.architectures.architecture import Architecture
    from nnsight_engine.envoys.envoy import Envoy

_EMBED: Final = "embed.output"
_NORM: Final = "norm.output"
_LOGITS: Final = "logits"
_PER_HEAD: Final = {table.QUERIES, table.KEYS, table.VALUES, table.HEADS}
_PER_NEURON: Final = {"mlp.gate", "mlp.up", table.NEURONS}


class Points:
    """The standard points of one model. Calling it lists them, indexing reads and writes."""

    def __init__(self, root: Envoy, architecture: Architecture | None) -> None:
        """Offer the points that ``architecture`` has; None has none, which is said when somebody asks."""
        self._root = root
        self._architecture = architecture
        self._points: dict[str, Point] = {}
        self._tokens = TokenShape()

    def __call__(self) -> dict[str, tuple[int, ...]]:
        """Return the name of every point with the shape of one position's value; -1 is a size that grows.

        Raises:
            NoStandardPointsError: The architecture is in no table; it says what is missing.
        """
        return {name: self._point(name).shape for name in self._names()}

    def __getitem__(self, name: str) -> Any:
        """Wait for the value of a point and return the tensor, a view where it is a part of a module's.

        Raises:
            UnknownPointError: There is no such point.
            NoStandardPointsError: There are none at all.
        """
        return self._point(name).read()

    def __setitem__(self, name: str, value: torch.Tensor) -> None:
        """Wait for the value of a point to come by, and replace it.

        Raises:
            UnknownPointError: There is no such point.
            NoStandardPointsError: There are none at all.
            PointValueError: The value does not fit.
        """
        self._point(name).write(value)

    def __contains__(self, name: object) -> bool:
        """Tell whether there is a point of that name."""
        return self._architecture is not None and name in set(self._names())

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names, in the order in which the model comes by them."""
        return self._names()

    def __repr__(self) -> str:
        """List the points, those of all layers in one line each."""
        architecture = self._architecture
        if architecture is None:
            return f"no standard points: {missing_for(self._root._module)}"
        lines = [f"{name} {shape}" for name, shape in self().items() if not name.startswith("layers.")]
        num_layers = architecture.num_layers
        leaves = [
            f"layers.*.{leaf} {self._point(f'layers.0.{leaf}').shape}" for leaf in _leaves(architecture)
        ]
        return "\n".join([f"points of {num_layers} layers:", lines[0], *leaves, *lines[1:]])

    def group(self, prefix: str) -> PointGroup:
        """Return the points that begin with ``prefix``, as attributes."""
        return PointGroup(self, prefix)

    def layer_of(self, envoy: Envoy) -> int:
        """Return the number of the layer that ``envoy`` is or is in."""
        layers = f"{self._root.path}.{self._known().path(self._known().family.layers)}."
        return int(str(envoy.path).removeprefix(layers).partition(".")[0])

    # Runs.

    def before_run(self) -> None:
        """Prepare for a run of the model: see what must be seen from its start."""
        architecture = self._architecture
        if architecture is not None and architecture.family.is_mlp_flattened:
            self._tokens.shape = None
            layers = [self._envoy(architecture.layer_path(index)) for index in range(architecture.num_layers)]
            self._root.interleaver.watch(self._tokens, [f"{layer.path}.input" for layer in layers])

    def after_run(self) -> None:
        """Leave the model as it was before the run."""
        for point in self._points.values():
            if isinstance(point, PatternPoint):
                point.release()

    # Finding.

    def _known(self) -> Architecture:
        if self._architecture is None:
            module = self._root._module
            raise NoStandardPointsError(
                f"{type(module).__name__} has no standard points: {missing_for(module)}. Use the paths of "
                "its own modules, which print(model) shows."
            )
        return self._architecture

    def _names(self) -> Iterator[str]:
        architecture = self._known()
        yield _EMBED
        for layer in range(architecture.num_layers):
            yield from (f"layers.{layer}.{leaf}" for leaf in _leaves(architecture))
        if architecture.has_norm:
            yield _NORM
        if architecture.has_logits:
            yield _LOGITS

    def _point(self, name: str) -> Point:
        point = self._points.get(name)
        if point is None:
            point = self._points[name] = self._found(name)
        return point

    def _found(self, name: str) -> Point:
        architecture = self._known()
        if name == _EMBED:
            return self._module_point(name, architecture.layer_path(0), "input")
        if name == _NORM and architecture.has_norm:
            return self._module_point(name, architecture.path(architecture.family.norm), "output")
        if name == _LOGITS and architecture.has_logits:
            return LogitsPoint(self._root, (self._config().vocab_size,))
        layer, leaf = self._parsed(name)
        if leaf == table.PATTERN:
            attention = self._envoy(architecture.layer_path(layer, architecture.family.attention))
            out = self._envoy(architecture.layer_path(layer, architecture.family.leaves[table.HEADS].path))
            return PatternPoint(name, attention, out, architecture.num_heads)
        place = architecture.family.leaves.get(leaf)
        if place is None:
            raise self._unknown(name)
        envoy = self._envoy(architecture.layer_path(layer, place.path))
        if architecture.family.is_mlp_flattened and leaf.startswith("mlp."):
            return FlattenedPoint(name, envoy, place.side, self._tokens, self._shape(leaf))
        return ModulePoint(name, envoy, place.side, architecture.view(leaf), self._shape(leaf))

    def _module_point(self, name: str, path: str, side: table.Side) -> ModulePoint:
        return ModulePoint(name, self._envoy(path), side, WHOLE, (self._config().hidden_size,))

    def _parsed(self, name: str) -> tuple[int, str]:
        """Return the layer, counted from 0, and the leaf of a layer's point."""
        try:
            found = PointPattern.parse(name).resolve(self._known().num_layers)
        except ApiError as error:
            raise self._unknown(name) from error
        if len(found) != 1 or found[0].layer < 0:
            raise self._unknown(name)
        return found[0].layer, found[0].leaf

    def _unknown(self, name: str) -> UnknownPointError:
        architecture = self._known()
        whole = [known for known in self._names() if not known.startswith("layers.")]
        return UnknownPointError(
            f"a point of this model is one of {', '.join(whole)}, or, such as layers.0.output, of a layer "
            f"from 0 to {architecture.num_layers - 1} one of {', '.join(_leaves(architecture))}; got {name!r}"
        )

    def _envoy(self, path: str) -> Envoy:
        envoy: Envoy = self._root.get(f"{self._root.path}.{path}")
        return envoy

    def _config(self) -> Any:
        config: Any = self._root._module.config
        return config.get_text_config()

    def _shape(self, leaf: str) -> tuple[int, ...]:
        """Return the shape of one position's value of a leaf that a module gives."""
        architecture = self._known()
        if leaf in _PER_HEAD:
            num_heads = (
                architecture.num_kv_heads if leaf in {table.KEYS, table.VALUES} else architecture.num_heads
            )
            return (num_heads, self._input_width(table.HEADS) // architecture.num_heads)
        if leaf in _PER_NEURON:
            return (self._input_width(table.NEURONS),)
        return (self._config().hidden_size,)

    def _input_width(self, leaf: str) -> int:
        """Return the width of a projection's input; configs disagree about whether they say it."""
        path = self._known().layer_path(0, self._known().family.leaves[leaf].path)
        module: Any = self._envoy(path)._module
        width: int = module.in_features if hasattr(module, "in_features") else module.nx
        return width


class PointGroup:
    """Points that begin alike, as attributes: ``layers[3].mlp.act``, ``embed.output``."""

    def __init__(self, points: Points, prefix: str) -> None:
        """Offer the points that begin with ``prefix``."""
        mine = self.__dict__
        mine["_points"] = points
        mine["_prefix"] = prefix

    def __getattr__(self, name: str) -> Any:
        """Wait for the value of a point and return it."""
        points: Points = self.__dict__["_points"]
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return points[f"{self.__dict__['_prefix']}.{name}"]
        except UnknownPointError as error:
            raise AttributeError(str(error), name=name, obj=self) from error

    def __setattr__(self, name: str, value: torch.Tensor) -> None:
        """Wait for the value of a point to come by, and replace it."""
        self.__dict__["_points"][f"{self.__dict__['_prefix']}.{name}"] = value

    def __dir__(self) -> list[str]:
        """List the points."""
        prefix = f"{self.__dict__['_prefix']}."
        return [name.removeprefix(prefix) for name in self.__dict__["_points"] if name.startswith(prefix)]

    def __repr__(self) -> str:
        """Say which points these are."""
        return f"points {self.__dict__['_prefix']}.*"


def _leaves(architecture: Architecture) -> list[str]:
    """Return the leaves of a layer, in order."""
    return [leaf for leaf in table.ORDER if leaf in architecture.family.leaves or leaf == table.PATTERN]
