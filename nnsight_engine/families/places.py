from __future__ import annotations

import dataclasses
import types
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Final, Literal, TypeVar

from nnsight_engine.core.leaves import HEADS, KEYS, NEURONS, QUERIES, VALUES

if TYPE_CHECKING:
    from torch import nn

Side = Literal["input", "output"]
Part = Literal["", "q", "k", "v", "gate", "up", "weights", "ids"]


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """A module of a block, one of its sides, and the blocks that have a leaf there.

    ``input`` is the module's first positional argument; ``output`` is its return value, or the first item of
    a tuple.

    Attributes:
        path: The module, below the block; empty for the block itself.
        part: Part of a fused output, or an item of what a router returns; empty for the whole tensor.
        operation: The operation inside the module's ``forward`` whose output it is, as ``source`` names it;
            empty for the module's own.
        needs: A module or parameter of the block without which it does not have the leaf; empty for none.
        lacks: A module or parameter of the block with which it does not have the leaf; empty for none.
    """

    path: str
    side: Side
    part: Part = ""
    operation: str = ""
    needs: str = dataclasses.field(default="", kw_only=True)
    lacks: str = dataclasses.field(default="", kw_only=True)

    def is_in(self, parts: Collection[str]) -> bool:
        is_excluded = bool(self.lacks) and self.lacks in parts
        return self.path in parts and not is_excluded and (not self.needs or self.needs in parts)


Places = Mapping[str, Place | tuple[Place, ...]]
"""The place of each leaf; of several, a block has the leaf at the first that is in it."""


def parts_of(block: nn.Module) -> set[str]:
    modules = {name for name, _ in block.named_modules(remove_duplicate=False)}
    return modules | {name for name, _ in block.named_parameters(remove_duplicate=False)}


def leaves_in(parts: Collection[str], places: Places) -> dict[str, Place]:
    found = {}
    for leaf, given in places.items():
        candidates = given if isinstance(given, tuple) else (given,)
        place = next((one for one in candidates if one.is_in(parts)), None)
        if place is not None:
            found[leaf] = place
    return found


def stream_leaves() -> dict[str, Place]:
    return {"input": Place("", "input"), "output": Place("", "output")}


def block_leaves(
    *,
    attention: str,
    qkv: str | tuple[str, str, str],
    out: str,
    mlp: str | tuple[str, str],
    up: str,
    down: str,
) -> dict[str, Place]:
    """Return the leaves of a block whose attention and MLP are called with one tensor.

    ``qkv`` may be a single fused projection. ``mlp`` is the MLP, or the first and the last of its modules;
    ``up`` its first projection, or the second of a gated MLP.
    """
    first, last = (mlp, mlp) if isinstance(mlp, str) else mlp
    q, k, v = (
        (Place(qkv, "output", "q"), Place(qkv, "output", "k"), Place(qkv, "output", "v"))
        if isinstance(qkv, str)
        else (Place(path, "output") for path in qkv)
    )
    return {
        "attn.output": Place(attention, "output"),
        QUERIES: q,
        KEYS: k,
        VALUES: v,
        HEADS: Place(out, "input"),
        "mlp.input": Place(first, "input"),
        "mlp.output": Place(last, "output"),
        "mlp.up": Place(up, "output"),
        NEURONS: Place(down, "input"),
    }


def gate_and_up(path: str) -> dict[str, Place]:
    """Return the leaves of an MLP's projection that returns the gate, then the other input of its product."""
    return {"mlp.gate": Place(path, "output", "gate"), "mlp.up": Place(path, "output", "up")}


_QKV: Final = (QUERIES, KEYS, VALUES)

P = TypeVar("P", Place, Place | tuple[Place, ...])


def apart(leaves: Mapping[str, Place], qkv: tuple[str, str, str]) -> dict[str, Place]:
    return {**leaves, **{leaf: Place(path, "output") for leaf, path in zip(_QKV, qkv, strict=True)}}


def frozen(places: Mapping[str, P]) -> Mapping[str, P]:
    return types.MappingProxyType(dict(places))


def without(names: Collection[str], leaves: Mapping[str, Place]) -> dict[str, Place]:
    return {leaf: place for leaf, place in leaves.items() if leaf not in names}


def renamed(leaves: Mapping[str, Place], names: Mapping[str, str]) -> dict[str, Place]:
    """Return leaves whose modules are below children of the block by other names."""
    found = {}
    for leaf, place in leaves.items():
        first, dot, rest = place.path.partition(".")
        found[leaf] = dataclasses.replace(place, path=f"{names.get(first, first)}{dot}{rest}")
    return found


def moved(leaves: Mapping[str, Place], paths: Mapping[str, str]) -> dict[str, Place]:
    return {
        leaf: dataclasses.replace(place, path=paths.get(place.path, place.path))
        for leaf, place in leaves.items()
    }


def mlp_lacks(leaves: Mapping[str, Place], module: str) -> dict[str, Place]:
    return {
        leaf: dataclasses.replace(place, lacks=module) if leaf.startswith("mlp.") else place
        for leaf, place in leaves.items()
    }
