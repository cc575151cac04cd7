"""A model's modules and points without its weights: the same in all workers, in sandboxes and on clients.

A client's ``rename=`` and ``envoys=`` are encoded for the workers.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
import torch

from nnsight_engine.core.model_spec import (
    EXPERT_WEIGHTS,
    EXPERTS,
    HEADS,
    LATENT,
    PATTERN,
    QUERIES,
    ROUTER,
    STATE,
    VALUES,
)
from nnsight_engine.envoys.envoy import EnvoyMap
from nnsight_engine.envoys.module_options import Rename
from nnsight_engine.families.layout import EngineFamily, Place
from nnsight_engine.serialization import encode


@dataclasses.dataclass(frozen=True, slots=True)
class ClientNames:
    """A client's additions to the module tree; ``envoys`` are by vLLM's class or by the end of a path."""

    rename: Rename | None = None
    envoys: EnvoyMap = None

    def write(self) -> bytes | None:
        """Return the additions as a message, or None if there are none; raise EncodeError."""
        if not self.rename and self.envoys is None:
            return None
        envoys: Any = self.envoys
        if isinstance(envoys, Mapping):
            envoys = list(envoys.items())
        return encode({"rename": dict(self.rename or {}), "envoys": envoys})


OutlineEntry = tuple[str, str, str, str]
"""Path, class name, description, and the path under which the same module was listed before, if any."""


class OutlinedModule(torch.nn.Module):
    """Placeholder for a module of the engine, which may be in another process."""

    description = ""

    def extra_repr(self) -> str:
        return self.description

    def _get_name(self) -> str:
        return self.class_name

    class_name = "Module"


_NONE: Final[Mapping[str, torch.nn.Module]] = types.MappingProxyType({})


def outline_of(
    model: torch.nn.Module, elsewhere: Mapping[str, torch.nn.Module] = _NONE
) -> list[OutlineEntry]:
    """List a model's modules, parents before children; ``elsewhere`` are those of other processes."""
    first_paths: dict[int, str] = {}
    entries = []
    for path, module in _walk("", model, elsewhere):
        known = first_paths.setdefault(id(module), path)
        entries.append((path, type(module).__name__, description_of(module), known if known != path else ""))
    return entries


def _walk(
    path: str, module: torch.nn.Module, elsewhere: Mapping[str, torch.nn.Module]
) -> Iterator[tuple[str, torch.nn.Module]]:
    """Iterate over modules with their paths, parents first; a repeated module comes under each path."""
    module = elsewhere.get(path, module)
    yield path, module
    for name, child in module._modules.items():  # noqa: SLF001 - named_children() skips repeated modules
        if child is not None:
            yield from _walk(f"{path}.{name}" if path else name, child, elsewhere)


def description_of(module: torch.nn.Module) -> str:
    """Return the module's ``extra_repr``; empty if it raises."""
    try:
        return str(module.extra_repr())
    except Exception:  # noqa: BLE001 - some use attributes that are missing in this configuration
        return ""


def outlined(entries: Sequence[OutlineEntry]) -> torch.nn.Module:
    """Build a tree of placeholders from an outline; return its root."""
    modules: dict[str, torch.nn.Module] = {}
    for path, class_name, description, same_as in entries:
        if same_as:
            module = modules[same_as]
        else:
            module = OutlinedModule()
            module.class_name = class_name
            module.description = description
        modules[path] = module
        if path:
            parent, _, name = path.rpartition(".")
            modules[parent].add_module(name, module)
    return modules[""]


@dataclasses.dataclass(frozen=True, slots=True)
class BlockPoints:
    """Points within one block; sizes are those of the whole model, and 0 or empty without the point.

    Attributes:
        kernel: Path, relative to the block, of vLLM's ``Attention``.
        latent_size: Width of ``attn.latent``.
        inner_size: Width of ``mlp.act``.
        num_chosen: Number of experts that are chosen for each token.
        forces_experts: Whether given experts can be used instead.
        hides_pattern: Attention has sinks beside the positions, or no module of transformers has the pattern.
        state_shape: Heads, head_dim and state_size of ``mixer.state``.
    """

    leaves: Mapping[str, Place]
    kernel: str = ""
    num_heads: int = 0
    latent_size: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    inner_size: int = 0
    num_experts: int = 0
    is_causal: bool = True
    num_chosen: int = 0
    forces_experts: bool = False
    hides_pattern: bool = False
    state_shape: tuple[int, ...] = ()

    @property
    def attention(self) -> str:
        return self.kernel.partition(".")[0]

    @property
    def attention_input(self) -> Place | None:
        """Where attention's input is, in a module of the block; None if that is unknown."""
        for leaf in (VALUES, QUERIES):
            if leaf in self.leaves:
                return Place(self.leaves[leaf].path, "input")
        # Its first projection has several names, or lacks biases; the norm before it has one.
        is_known = LATENT in self.leaves or HEADS in self.leaves
        return Place("input_layernorm", "output") if is_known else None

    @property
    def mlp(self) -> str:
        """Path of the MLP, relative to the block; empty if there is no module of its own."""
        if "mlp.input" not in self.leaves or "mlp.output" not in self.leaves:
            return ""
        input_path, output_path = self.leaves["mlp.input"].path, self.leaves["mlp.output"].path
        return input_path if input_path == output_path else ""

    @property
    def has_pattern(self) -> bool:
        """Whether attention's probabilities can be computed from its queries and keys."""
        is_offered = self.is_causal and not self.hides_pattern
        return bool(self.kernel) and "attn.k" in self.leaves and is_offered

    def shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """Return the shape of each leaf's value at one position; -1 is the number of positions before it."""
        queries, keys = (self.num_heads, self.head_dim), (self.num_kv_heads, self.head_dim)
        inner = (self.inner_size,)
        of_leaf = {
            "attn.q": queries,
            "attn.heads": queries,
            "attn.k": keys,
            "attn.v": keys,
            "mlp.gate": inner,
            "mlp.up": inner,
            "mlp.act": inner,
            LATENT: (self.latent_size,),
            ROUTER: (self.num_experts,),
            EXPERTS: (self.num_chosen,),
            EXPERT_WEIGHTS: (self.num_chosen,),
            STATE: self.state_shape,
        }
        shapes = {leaf: of_leaf.get(leaf, (hidden_size,)) for leaf in self.leaves}
        return shapes | ({PATTERN: (self.num_heads, -1)} if self.has_pattern else {})


@dataclasses.dataclass(frozen=True, slots=True)
class ModelLayout:
    family: EngineFamily
    blocks: tuple[BlockPoints, ...]

    def to_plain(self) -> dict[str, Any]:
        """Return the layout as JSON values; blocks that are alike are listed once."""
        kinds: list[BlockPoints] = []
        for block in self.blocks:
            if block not in kinds:
                kinds.append(block)
        # The table's leaves are those of the blocks.
        family = dataclasses.replace(self.family, leaves={})
        return {
            "family": msgspec.to_builtins(family),
            "kinds": [msgspec.to_builtins(kind) for kind in kinds],
            "blocks": [kinds.index(block) for block in self.blocks],
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> ModelLayout:
        kinds = [msgspec.convert(kind, BlockPoints) for kind in plain["kinds"]]
        family = msgspec.convert(plain["family"], EngineFamily)
        return cls(family, tuple(kinds[index] for index in plain["blocks"]))
