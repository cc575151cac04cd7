"""Places of leaves in the modules of a block, as the tables of both engines write them down."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Literal, TypeVar

Side = Literal["input", "output"]


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """A module of a block, one of its sides, and the blocks that have a leaf there.

    Attributes:
        path: The module, below the block; empty for the block itself.
        side: The module's input or output.
        needs: A module below the block without which it does not have the leaf; empty for none.
        lacks: A module below the block with which it does not have the leaf; empty for none.
    """

    path: str
    side: Side
    needs: str = dataclasses.field(default="", kw_only=True)
    lacks: str = dataclasses.field(default="", kw_only=True)

    def is_in(self, modules: Collection[str]) -> bool:
        """Return whether a block with modules at these paths has the leaf."""
        is_excluded = bool(self.lacks) and self.lacks in modules
        return self.path in modules and not is_excluded and (not self.needs or self.needs in modules)


P = TypeVar("P", bound=Place)


def leaves_in(
    modules: Collection[str], leaves: Mapping[str, P], other_leaves: Mapping[str, P]
) -> dict[str, P]:
    """Return the leaves of a block with modules at these paths; ``leaves`` take precedence."""
    both = (*other_leaves.items(), *leaves.items())
    return {leaf: place for leaf, place in both if place.is_in(modules)}


def renamed(leaves: Mapping[str, P], names: Mapping[str, str]) -> dict[str, P]:
    """Return leaves whose modules are below children of the block by other names."""
    found = {}
    for leaf, place in leaves.items():
        first, dot, rest = place.path.partition(".")
        found[leaf] = dataclasses.replace(place, path=f"{names.get(first, first)}{dot}{rest}")
    return found


def mlp_lacks(leaves: Mapping[str, P], module: str) -> dict[str, P]:
    """Return leaves of which blocks with a module do not have those of the MLP."""
    return {
        leaf: dataclasses.replace(place, lacks=module) if leaf.startswith("mlp.") else place
        for leaf, place in leaves.items()
    }
