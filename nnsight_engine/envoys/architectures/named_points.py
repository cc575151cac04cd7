"""Base of ``model.points``: one interface for a transformers model and a model in vLLM's workers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final, Self

import torch

from api_schemas.errors import ApiError
from api_schemas.points import ENCODER_BLOCK, PointPattern, point_name
from nnsight_engine.core.saves import Place

if TYPE_CHECKING:
    from nnsight_engine.envoys.architectures.module_points import PointAccess
    from nnsight_engine.envoys.envoy import Envoy


class NoStandardPointsError(ValueError):
    """The model's architecture is in no table; only its own module paths can be used."""


class UnknownPointError(LookupError):
    """The model has standard points, but none of that name."""


class PointValueError(ValueError):
    """A value to be written to a point has the wrong type or shape."""


class PatternError(ValueError):
    """The model's attention implementation yields no probabilities, or would ignore written ones."""


class StateError(ValueError):
    """A recurrent state is not kept where the block runs, or was to be written."""

    @classmethod
    def unwritable(cls, name: str) -> StateError:
        return cls(
            f"{name} cannot be written: kernels update it in place, and read it before the next position. "
            "Write mixer.output behind it"
        )


EMBED: Final = "embed.output"
NORM: Final = "norm.output"
LOGITS: Final = "logits"


class NamedPoints(Place, ABC):
    """The points of one model. Calling it lists them, indexing reads and writes."""

    root: Envoy

    def __init__(self) -> None:
        self._points: dict[str, PointAccess] = {}

    @abstractmethod
    def _num_layers(self) -> int: ...

    @abstractmethod
    def _leaves(self, layer: int) -> list[str]:
        """Return the leaves of a layer, in the order in which the model computes them."""

    @abstractmethod
    def _points_before_layers(self) -> list[str]: ...

    @abstractmethod
    def _points_after_layers(self) -> list[str]: ...

    def _num_encoder_layers(self) -> int:
        return 0

    @abstractmethod
    def _access_of(self, name: str) -> PointAccess: ...

    def __call__(self) -> dict[str, tuple[int, ...]]:
        """Return the name of every point with the shape of one position's value; -1 for a size that grows.

        Raises:
            NoStandardPointsError: The architecture is in no table; the message gives the reason.
        """
        return {name: self._point(name).shape for name in self._names()}

    def __getitem__(self, name: str) -> Any:
        """Wait for the value of a point and return the tensor; a part of a module's tensor is a view.

        Raises:
            UnknownPointError: There is no such point.
            NoStandardPointsError: The model has no standard points.
        """
        return self._point(name).read()

    def __setitem__(self, name: str, value: torch.Tensor) -> None:
        """Wait for the value of a point and replace it.

        Raises:
            UnknownPointError: There is no such point.
            NoStandardPointsError: The model has no standard points.
            PointValueError: The value does not fit.
        """
        self._point(name).write(value)

    def __contains__(self, name: object) -> bool:
        return name in set(self._names())

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names, in the order in which the model computes the points."""
        return self._names()

    def __repr__(self) -> str:
        num_layers, encoder = self._num_layers(), self._encoder_names()
        lines = _with_layers(
            num_layers,
            lambda layer: [self._shaped(f"layers.{layer}.{leaf}") for leaf in self._leaves(layer)],
        )
        return "\n".join(
            [
                f"points of {num_layers} layers:",
                *([f"{point_name(ENCODER_BLOCK)} {self._point(encoder[0]).shape}"] if encoder else []),
                *map(self._shaped, self._points_before_layers()),
                *(f"layers.*.{line}" for line in lines),
                *map(self._shaped, self._points_after_layers()),
            ]
        )

    def group(self, prefix: str) -> PointGroup:
        return PointGroup(self, prefix)

    def _encoder_names(self) -> list[str]:
        return [point_name(ENCODER_BLOCK, layer) for layer in range(self._num_encoder_layers())]

    def _names(self) -> Iterator[str]:
        """Yield the names of all points, in the order in which the model computes them."""
        yield from self._encoder_names()
        yield from self._points_before_layers()
        for layer in range(self._num_layers()):
            yield from (f"layers.{layer}.{leaf}" for leaf in self._leaves(layer))
        yield from self._points_after_layers()

    def _shaped(self, name: str) -> str:
        return f"{name.split('.', 2)[-1] if name.startswith('layers.') else name} {self._point(name).shape}"

    def _point(self, name: str) -> PointAccess:
        """Return the point of a name, which is created once; UnknownPointError if there is none."""
        point = self._points.get(name)
        if point is None:
            point = self._points[name] = self._access_of(name)
        return point

    def _parsed(self, name: str) -> tuple[int, str]:
        """Return the layer and the leaf that a name stands for; UnknownPointError unless it is one point."""
        try:
            pattern = PointPattern.parse(name)
            is_in_encoder = pattern.leaf == ENCODER_BLOCK
            names = pattern.resolve(self._num_encoder_layers() if is_in_encoder else self._num_layers())
        except ApiError as error:
            raise self._unknown(name) from error
        if len(names) != 1 or names[0].layer < 0:
            raise self._unknown(name)
        return names[0].layer, names[0].leaf

    def _unknown(self, name: str) -> UnknownPointError:
        encoder = [point_name(ENCODER_BLOCK)] if self._num_encoder_layers() else []
        outside_layers = ", ".join([*encoder, *self._points_before_layers(), *self._points_after_layers()])
        num_layers = self._num_layers()
        leaves = _with_layers(num_layers, self._leaves)
        return UnknownPointError(
            f"a point of this model is one of {outside_layers}, or, such as layers.0.output, of a layer "
            f"from 0 to {num_layers - 1} one of {', '.join(leaves)}; got {name!r}"
        )


def _with_layers(num_layers: int, names_of_layer: Callable[[int], Iterable[str]]) -> list[str]:
    """Return each name once, in order, with the numbers of its layers if not all layers have it."""
    by_name: dict[str, list[int]] = {}
    for layer in range(num_layers):
        for name in names_of_layer(layer):
            by_name.setdefault(name, []).append(layer)
    return [
        name if len(layers) == num_layers else f"{name} (layers {', '.join(map(str, layers))})"
        for name, layers in by_name.items()
    ]


class PartList(Place):
    """An ordered list of a model's parts under a standard name: its layers."""


class PointGroup(Place):
    """Points with a common prefix, as attributes: ``layers[3].mlp.act``, ``embed.output``."""

    def __init__(self, points: NamedPoints, prefix: str) -> None:
        """Set the attributes past ``__setattr__``, which writes points."""
        state = self.__dict__
        state["_points"] = points
        state["_prefix"] = prefix

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        points: NamedPoints = self.__dict__["_points"]
        try:
            return points[f"{self.__dict__['_prefix']}.{name}"]
        except UnknownPointError as error:
            raise AttributeError(str(error), name=name, obj=self) from error

    def __setattr__(self, name: str, value: torch.Tensor) -> None:
        self.__dict__["_points"][f"{self.__dict__['_prefix']}.{name}"] = value

    def next(self, step: int = 1) -> Self:
        """Move this block's requests on by ``step`` generation steps."""
        points: NamedPoints = self.__dict__["_points"]
        points.root.next(step)
        return self

    def __dir__(self) -> list[str]:
        prefix = f"{self.__dict__['_prefix']}."
        return [name.removeprefix(prefix) for name in self.__dict__["_points"] if name.startswith(prefix)]

    def __repr__(self) -> str:
        return f"points {self.__dict__['_prefix']}.*"
