"""The standard names of a model in vLLM: ``model.layers[3].attn.heads`` and ``model.points``.

vLLM's own modules keep their own values: a block of Llama returns ``(hidden, residual)``. The standard names
are the same on every architecture and on ``LanguageModel``, with single tensors ``[tokens, ...]`` of the
block's own request. In the worker a point reads and writes values (``points_worker``). On the client it has
no value: the names are for code in blocks, and are sent as references to objects in the worker.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NoReturn, overload

import torch

from nnsight_engine.core import model_spec as leaf_names
from nnsight_engine.core.model_spec import leaf_at
from nnsight_engine.envoys.architectures.named_points import (
    EMBED,
    LOGITS,
    NORM,
    NamedPoints,
    PartList,
    PointGroup,
    UnknownPointError,
)
from nnsight_engine.envoys.envoy import Envoy
from nnsight_engine.envoys.values import with_own_output
from nnsight_engine.interleaving.shared_variables import Barrier
from nnsight_engine.modeling.generator import WrapperModule
from nnsight_engine.serialization import EncodeError
from nnsight_engine.tracing.tracer import Tracer
from nnsight_engine.vllm_backend.module_tree import ModelLayout

if TYPE_CHECKING:
    from nnsight_engine.core.model_spec import LeafSpec, ModelSpec
    from nnsight_engine.envoys.architectures.module_points import PointAccess

SAMPLES: Final = "samples"
_VALUES: Final = (LOGITS, SAMPLES)
_STANDARD: Final = ("points", "layers", "norm", "embed")
_LAYERS: Final = "layers"
_IMAGES: Final = "vision."
_POINTS: Final = "points"
_GROUPS: Final = ("attn", "mlp")
ATTENTION_INPUT: Final = "attn.input"
NORM_INPUT: Final = "norm.input"
_OF_THAT_SHAPE: Final = {ATTENTION_INPUT: ("input", "attn.output"), NORM_INPUT: (NORM,)}
"""Points of which a model with the other has at least one."""


class NamedPlace:
    """A point on the client: a name and a shape."""

    def __init__(self, points: EnginePoints, name: str, shape: tuple[int, ...]) -> None:
        self.points = points
        self.name = name
        self.shape = shape

    def read(self) -> torch.Tensor:
        """Return a meta tensor of the shape that a scan has found; ValueError if there was no scan."""
        scanned = self.points.scanned
        if scanned is not None:
            num_tokens, dtype = scanned
            rows = 1 if self.name == LOGITS else num_tokens
            sizes = [num_tokens if size < 0 else size for size in self.shape]  # -1 stands for the tokens
            if self.name.endswith(leaf_names.PATTERN):
                return torch.empty(sizes[0], rows, *sizes[1:], dtype=torch.float32, device="meta")
            if self.name.endswith(leaf_names.STATE):
                return torch.empty(sizes, dtype=dtype, device="meta")
            return torch.empty(rows, *sizes, dtype=dtype, device="meta")
        raise ValueError(
            f"Cannot return {self.name}: the model did not execute here. Read it inside `with "
            "model.trace(prompt):`, or inside `with tracer.invoke(prompt):` if the trace itself has no input."
        )

    def write(self, value: torch.Tensor) -> NoReturn:
        del value
        raise ValueError(f"Cannot set {self.name} that is not interleaving: assign it inside a trace.")


class EnginePoints(NamedPoints):
    """The standard points of a model that vLLM runs.

    ``scanned`` has the number of tokens and the dtype of values in the last scan; None without a scan.
    """

    scanned: tuple[int, torch.dtype] | None = None

    def __init__(self, root: Envoy, layout: ModelLayout, leaves: Sequence[LeafSpec]) -> None:
        """Offer the points with specs in ``leaves``; ``root`` is the envoy of the model."""
        super().__init__()
        self.root = root
        self.layout = layout
        self.family = layout.family
        self._specs = leaves
        self._names_of_leaves = {leaf.name for leaf in leaves}

    @staticmethod
    def on_client(root: Envoy, spec: ModelSpec) -> EnginePoints:
        """Return the points of an engine's model for the client."""
        return EnginePoints(root, ModelLayout.from_plain(spec.layout), spec.leaves)

    @property
    def num_layers(self) -> int:
        return len(self.layout.blocks)

    def has(self, name: str) -> bool:
        """Return whether the model has a point, such as ``layers.3.attn.heads``, or ``norm``."""
        prefix, _, rest = name.partition(".")
        layer, _, leaf = rest.partition(".")
        if prefix != _LAYERS or not leaf:
            return name == NORM_INPUT or name in self._names_of_leaves
        return self._spec(int(layer), leaf) is not None

    def _num_layers(self) -> int:
        return self.num_layers

    def _leaves(self, layer: int) -> list[str]:
        return [leaf for leaf in self.family.order if leaf != ATTENTION_INPUT and self._spec(layer, leaf)]

    def _points_before_layers(self) -> list[str]:
        return [EMBED] if EMBED in self._names_of_leaves else []

    def _points_after_layers(self) -> list[str]:
        return [name for name in (NORM, LOGITS) if name in self._names_of_leaves]

    def _unknown(self, name: str) -> UnknownPointError:
        if name.startswith(_IMAGES):
            return UnknownPointError(
                f"on vLLM {name} is a point of operations only, such as `capture` and `steer`: images are "
                "encoded before the step in which blocks run, and once for all requests with the same image. "
                "A local VisionLanguageModel has the points of its encoder in traces"
            )
        return super()._unknown(name)

    def _access_of(self, name: str) -> PointAccess:
        return NamedPlace(self, name, self._shape(*self._resolved(name)))

    def _shape(self, layer: int, leaf: str) -> tuple[int, ...]:
        spec = self._spec(layer, leaf)
        assert spec is not None  # noqa: S101 - resolved before
        return spec.shape

    def _spec(self, layer: int, leaf: str) -> LeafSpec | None:
        """Return the spec of a point, or of another with its shape; None if the model has none.

        ``layer`` is -1 for a point of the whole model.
        """
        # Not in ``points``, only on parts: the input of attention's projections, and of the final norm.
        if leaf == ATTENTION_INPUT and self.layout.blocks[layer].attention_input is None:
            return None
        specs = (leaf_at(self._specs, name, layer) for name in _OF_THAT_SHAPE.get(leaf, (leaf,)))
        return next(filter(None, specs), None)

    def _resolved(self, name: str) -> tuple[int, str]:
        """Return the layer (-1 for a point of the whole model) and the leaf; raises UnknownPointError."""
        is_whole = name in {NORM_INPUT, *self._points_before_layers(), *self._points_after_layers()}
        layer, leaf = (-1, name) if is_whole else self._parsed(name)
        if self._spec(layer, leaf) is None:
            raise self._unknown(name)
        return layer, leaf

    def layer_of(self, envoy: Envoy) -> int:
        """Return the index of the layer that ``envoy`` is or is in."""
        layers = f"{self.root.path}.{self.family.layers}."
        return int(str(envoy.path).removeprefix(layers).partition(".")[0])

    def raw(self, path: str) -> Envoy:
        """Return the envoy of vLLM's module at a path below the model."""
        envoy: Envoy = self.root.get(f"{self.root.path}.{path}")
        return envoy

    def skip(self, part: Part, raw: Envoy, value: Any) -> None:  # noqa: ARG002 - the worker's needs both
        """Use a value as the output of a layer or its part, which has the envoy ``raw``."""
        raw.skip(value)

    # Names.

    def name_parts(self) -> set[str]:
        return {*_STANDARD, *_VALUES, *_GROUPS, *(part for name in self for part in name.split("."))}

    def standard(self, name: str) -> Any:
        """Return the object with a standard name; raises LookupError.

        Names are points, layers, embed, norm, a layer (``layers.3``) and a part of one (``layers.3.attn``).
        """
        if name == _POINTS:
            return self
        if name == _LAYERS:
            return Layers(self)
        if name == "embed":
            return PointGroup(self, name)
        if name == "norm":
            if NORM not in self._names_of_leaves:
                raise self._unknown(NORM)
            return Part(self, name, self.raw(self.family.final_norm))
        _, _, rest = name.partition(".")
        layer, _, group = rest.partition(".")
        return self.layer(int(layer)) if not group else self.part(int(layer), group)

    def layer(self, index: int) -> Part:
        return Part(self, f"{_LAYERS}.{index}", self.raw(f"{self.family.layers}.{index}"))

    def part(self, layer: int, group: str) -> PointGroup:
        """Return a layer's ``attn`` or ``mlp``."""
        prefix = f"{_LAYERS}.{layer}.{group}"
        block = self.layout.blocks[layer]
        path = block.attention if group == "attn" else block.mlp
        if not path:
            return PointGroup(self, prefix)
        return Part(self, prefix, self.raw(f"{self.family.layers}.{layer}.{path}"))


class Part(PointGroup):
    """A layer, or its attention or MLP, by its standard name; other attributes are those of vLLM's module."""

    def __init__(self, points: EnginePoints, prefix: str, raw: Envoy) -> None:
        super().__init__(points, prefix)
        self.__dict__["_raw"] = raw

    @property
    def place(self) -> str:
        prefix: str = self.__dict__["_prefix"]
        return prefix

    @property
    def owner(self) -> EnginePoints:
        points: EnginePoints = self.__dict__["_points"]
        return points

    def __getattr__(self, name: str) -> Any:
        """Return a part, the value of a point, or an attribute of the envoy of vLLM's module."""
        mine = self.__dict__
        points: EnginePoints = mine["_points"]
        layer = _layer(mine["_prefix"])
        if layer is not None and name in _GROUPS:
            return points.part(layer, name)
        raw: Envoy = mine["_raw"]
        if self._has(name):
            return super().__getattr__(name)
        for path in further_names(raw, name):
            first_name = path.partition(".")[0]
            if (layer is not None and first_name in _GROUPS) or self._has(first_name):
                return operator.attrgetter(path)(self)
        return getattr(raw, name)

    def _has(self, name: str) -> bool:
        """Return whether a name is a point; a child module of that name takes precedence."""
        mine = self.__dict__
        children: list[str] = mine["_raw"]._names  # noqa: SLF001 - an envoy of ours
        return name not in children and bool(mine["_points"].has(f"{mine['_prefix']}.{name}"))

    def __setattr__(self, name: str, value: Any) -> None:
        """Write a point, or an attribute of the envoy of vLLM's module."""
        if self._has(name):
            super().__setattr__(name, value)
        else:
            setattr(self.__dict__["_raw"], name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Apply the module to values of the block's own."""
        return self.__dict__["_raw"](*args, **kwargs)

    def skip(self, value: Any) -> None:
        """Use ``value``, one tensor, as the output; the module runs for other requests only."""
        mine = self.__dict__
        mine["_points"].skip(self, mine["_raw"], value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self.__dict__["_raw"])})

    def __repr__(self) -> str:
        return repr(self.__dict__["_raw"])


class Layers(PartList):
    """The layers of a model, in order: ``model.layers[3]``, ``for layer in model.layers``."""

    def __init__(self, points: EnginePoints) -> None:
        self.points = points

    def __len__(self) -> int:
        return self.points.num_layers

    def __iter__(self) -> Iterator[Part]:
        return (self.points.layer(index) for index in range(len(self)))

    @overload
    def __getitem__(self, key: int) -> Part: ...

    @overload
    def __getitem__(self, key: slice) -> list[Part]: ...

    def __getitem__(self, key: int | slice) -> Part | list[Part]:
        """Return one layer, or several; a negative index counts from the end."""
        numbers = range(len(self))
        if isinstance(key, slice):
            return [self.points.layer(index) for index in numbers[key]]
        return self.points.layer(numbers[key])

    def __repr__(self) -> str:
        return repr(self.points.raw(self.points.family.layers))


class StandardNames(Envoy):
    """An envoy of a model in vLLM, on either side, that has the standard names beside the model's own."""

    def _standard_points(self) -> EnginePoints | None:
        return self.__dict__.get("_points")

    def _add_values(self) -> None:
        for name in _VALUES:
            self._add_envoy(WrapperModule(), name)
            del self.__dict__[name]  # so that ``__getattr__`` is asked, which waits for the value in a block

    def _check_names(self) -> None:
        """Check nothing: the names may be those of modules of other stages, or standard names."""

    def __getattr__(self, name: str) -> Any:
        """Look a name up as ``Envoy`` does, then among the standard names, which never hide another name.

        In a block, ``logits`` and ``samples`` are values; elsewhere they are their places.
        """
        if name in _VALUES and name in self.__dict__.get("_names", ()):
            place = self._child(name)
            in_block = place.interleaver.current is not None
            return with_own_output(place.output, self, name) if in_block else place
        if name not in _STANDARD:
            return self._renamed(name)
        try:
            return super().__getattr__(name)
        except AttributeError:
            points = self._standard_points()
            if points is None:
                raise
            try:
                return points.standard(name)
            except LookupError as error:
                raise AttributeError(str(error), name=name, obj=self) from error

    def _renamed(self, name: str) -> Any:
        """Look a name up, then the paths that ``rename=`` gives it, which may begin with a standard name."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if self.__dict__.get("_points") is None:
                raise
            for path in further_names(self, name):
                if path.partition(".")[0] in _STANDARD:
                    return operator.attrgetter(path)(self)
            raise

    def __setattr__(self, name: str, value: Any) -> None:
        """Write the logits or the sampled tokens, or set an attribute as ``Envoy`` does."""
        points = self.__dict__.get("_points")
        if name not in _VALUES or points is None or isinstance(value, torch.nn.Module):
            super().__setattr__(name, value)
        elif name == LOGITS:
            points[LOGITS] = value
        else:
            self._child(name).output = value


def further_names(envoy: Envoy, name: str) -> list[str]:
    aliases = envoy._alias  # noqa: SLF001 - an envoy of ours
    return [] if aliases is None else aliases.resolve(name)


def place_of(value: object) -> tuple[str, str] | None:
    """Return the reference by which the other side finds the same place in the model; else None."""
    if isinstance(value, Envoy):
        return ("envoy", str(value.path))
    name = standard_name(value)
    return None if name is None else ("standard", name)


def place_named(root: StandardNames, kind: str, name: str) -> Any:
    """Return the object of a reference made by ``place_of``; LookupError if there is none."""
    if kind == "envoy":
        return root.get(name)
    points = root._standard_points() if kind == "standard" else None  # noqa: SLF001 - its own
    if points is None:
        raise LookupError(f"nothing is known by {(kind, name)!r}")
    return points.standard(name)


def standard_name(value: object) -> str | None:
    """Return the name for which ``EnginePoints.standard`` returns this object; None if there is none."""
    if isinstance(value, EnginePoints):
        return _POINTS
    if isinstance(value, Layers):
        return _LAYERS
    if isinstance(value, PointGroup):
        prefix: str = value.__dict__["_prefix"]
        return prefix
    return None


def _layer(prefix: str) -> int | None:
    first, _, rest = prefix.partition(".")
    return int(rest) if first == _LAYERS and rest.isdecimal() else None


def reference_of(value: Any, model: Envoy, barriers: list[Barrier]) -> tuple[str, ...] | None:
    """Return the reference of an object that is looked up in the worker; None for objects that are sent.

    EncodeError if the object is a module of another model, which the worker does not have.
    """
    if isinstance(value, Envoy) and value._root is not model._root:  # noqa: SLF001 - envoys of ours
        raise EncodeError(
            f"the block uses {value.path} of another model than the one it traces; the engine has that one "
            "alone. Save the other model's values in a trace of its own, and use them here"
        )
    place = place_of(value)
    if place is not None:
        return place
    if isinstance(value, Tracer):
        return ("tracer",)
    if isinstance(value, Barrier):
        return ("barrier", str(barriers.index(value)), str(value.participants))
    return None
