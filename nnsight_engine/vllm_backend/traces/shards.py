"""The layouts of values that are sharded over tensor-parallel ranks, and the conversion of parts and wholes.

Between a column-parallel and a row-parallel layer each rank has columns of its own. A fused projection is
sharded matrix by matrix, so the concatenation of the ranks' parts is not the whole, in which all queries come
first, then all keys, then all values. With more ranks than key-value heads, neighbouring ranks hold copies of
the same heads.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import torch
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.mamba.mamba_mixer2 import Mixer2RMSNormGated
from vllm.model_executor.layers.minimax_rms_norm.rms_norm_tp import MiniMaxText01RMSNormTP
from vllm.model_executor.layers.vocab_parallel_embedding import (
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

from nnsight_engine.core.model_spec import LATENT, MIXER
from nnsight_engine.core.trees import map_tensors
from nnsight_engine.vllm_backend.hooks import ExpertChoice, InnerValue
from nnsight_engine.vllm_backend.model_points import base_module
from nnsight_engine.vllm_backend.traces.errors import SpreadModuleError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import nn

    from nnsight_engine.vllm_backend.model_points import ModelPoints
    from nnsight_engine.vllm_backend.module_tree import BlockPoints

_ACTIVATIONS: Final = (
    "vllm.model_executor.layers.activation",
    "transformers.activations",
    "torch.nn.modules.activation",
)
_ROTARY: Final = "vllm.model_executor.layers.rotary_embedding"
_PLAIN_WEIGHTS: Final = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
_HEAD_NORMS: Final = ("q_norm", "k_norm", "v_norm")
_IN_GROUPS: Final = ("in_proj", "conv1d")
"""Linear layers of a mixer whose columns follow its groups of B and C."""
_LATENT_NORMS: Final = ("q_a_layernorm", "kv_a_layernorm")
COLLECTIVE: Final = (LogitsProcessor, MoERunner, Mixer2RMSNormGated, MiniMaxText01RMSNormTP)
"""Modules without sharded layers inside that wait for the other ranks."""

Gather = Callable[[torch.Tensor], torch.Tensor]
"""Returns each rank's tensor, ``[ranks, *shape]``; all ranks call it together."""


@dataclasses.dataclass(frozen=True, slots=True)
class ShardPiece:
    """Columns of a rank's part from one matrix; ``copies`` neighbouring ranks hold the same columns."""

    width: int
    copies: int = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """The sharding of one tensor: the pieces of a rank's part, in order; ``axis`` is counted from the end."""

    pieces: tuple[ShardPiece, ...]
    axis: int = -1

    def fits(self, part: torch.Tensor) -> bool:
        return part.ndim >= -self.axis and part.shape[self.axis] == self._width

    def whole(self, parts: torch.Tensor) -> torch.Tensor:
        """Return the whole of the ranks' parts, ``[ranks, *shape]``: piece by piece, of copies the first."""
        starts = _starts(piece.width for piece in self.pieces)
        return torch.cat(
            [
                part
                for piece, start in zip(self.pieces, starts, strict=True)
                for part in parts[:: piece.copies].narrow(self.axis, start, piece.width)
            ],
            dim=self.axis,
        )

    def part(self, whole: torch.Tensor, rank: int, size: int) -> torch.Tensor:
        """Return a rank's part as a new tensor; ValueError if the whole has another number of columns."""
        width = self.width_over(size)
        if whole.ndim < -self.axis or whole.shape[self.axis] != width:
            raise ValueError(
                f"a value that is spread over {size} ranks has {width} columns here, got one of shape "
                f"{tuple(whole.shape)}"
            )
        starts = _starts(piece.width * size // piece.copies for piece in self.pieces)
        return torch.cat(
            [
                whole.narrow(self.axis, start + rank // piece.copies * piece.width, piece.width)
                for piece, start in zip(self.pieces, starts, strict=True)
            ],
            dim=self.axis,
        )

    def width_over(self, size: int) -> int:
        return sum(piece.width * size // piece.copies for piece in self.pieces)

    @property
    def _width(self) -> int:
        return sum(piece.width for piece in self.pieces)


def _starts(widths: Iterable[int]) -> list[int]:
    return list(itertools.accumulate(widths, initial=0))[:-1]


@dataclasses.dataclass(frozen=True, slots=True)
class ShardLocation:
    """The layouts of a value's first tensors, None for one that every rank has whole, and of the ``rest``."""

    layouts: tuple[Layout | None, ...] = ()
    rest: Layout | None = None

    def layout_of(self, index: int) -> Layout | None:
        return self.layouts[index] if index < len(self.layouts) else self.rest

    @property
    def is_spread(self) -> bool:
        return self.rest is not None or any(layout is not None for layout in self.layouts)

    def fits(self, parts: Sequence[torch.Tensor]) -> bool:
        pairs = [(self.layout_of(index), part) for index, part in enumerate(parts)]
        return all(layout is None or layout.fits(part) for layout, part in pairs)

    def whole(self, value: Any, gather: Gather) -> Any:
        """Replace the parts in a value by wholes; all ranks call this together."""

        def gathered(index: int, part: torch.Tensor) -> torch.Tensor:
            layout = self.layout_of(index)
            return part if layout is None else layout.whole(gather(part))

        return map_numbered(value, gathered)

    def part(self, value: Any, rank: int, size: int) -> Any:
        """Return a rank's part of a value of whole tensors; ``size`` is the number of ranks."""

        def cut(index: int, whole: torch.Tensor) -> torch.Tensor:
            layout = self.layout_of(index)
            return whole if layout is None else layout.part(whole, rank, size)

        return map_numbered(value, cut)


def map_numbered(value: Any, change: Callable[[int, torch.Tensor], torch.Tensor]) -> Any:
    """Apply ``change`` to every tensor of ``value``, with its number, counted from left to right."""
    number = -1

    def numbered(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal number
        number += 1
        return change(number, tensor)

    return map_tensors(value, numbered)


EVERYWHERE: Final = ShardLocation()
"""The location of values that every rank has whole."""


class Shards:
    """The sharding of the model's values, built once from the loaded model."""

    def __init__(self, points: ModelPoints, modules: Iterable[tuple[nn.Module, str]]) -> None:
        """Determine the layouts of all values; ``modules`` are this worker's, with their paths."""
        self._size = points.tensor_parallel_size
        self._modules = {path: module for module, path in modules}
        self._paths = {id(module): path for path, module in self._modules.items()}
        self._places: dict[str, ShardLocation] = {}
        self._unknown: set[str] = set()  # providers of values whose layout is not known
        for path, module in self._modules.items():
            self._place_linear(path, module)
        # Modules that all ranks call together.
        self._spread = {path for path, module in self._modules.items() if _is_parallel(module)}
        self._held: set[str] = set()  # modules whose own tensors are parts of an unknown layout
        for path, module in self._modules.items():
            if isinstance(module, InnerValue) and not isinstance(module, ExpertChoice):
                self._set_locations(path, None, None)  # a rank's summand
            elif isinstance(module, MoERunner) and not module.moe_config.is_sequence_parallel:
                self._set_locations(
                    path, EVERYWHERE, None if module.moe_config.skip_final_all_reduce else EVERYWHERE
                )
        for layer in points.local_layers:
            block = points.layout.blocks[layer]
            if block.kernel:
                self._place_attention(points, layer, block)
            if MIXER in block.leaves:
                self._place_mixer(points.layers[layer], block.leaves[MIXER].path)
            if block.mlp or "mlp.up" in block.leaves:
                self._place_mlp(points.layers[layer], block)

    def location_of(self, provider: str) -> ShardLocation:
        return self._places.get(provider, EVERYWHERE)

    def is_understood(self, provider: str) -> bool:
        path, dot, _ = provider.rpartition(".")
        return not dot or (path in self._modules and provider not in self._unknown)

    def needs_all(self, path: str) -> bool:
        """Return whether all ranks must call the module at ``path`` together."""
        return any(spread == path or spread.startswith(f"{path}.") for spread in self._spread)

    def has_parts(self, path: str) -> bool:
        return path in self._spread or path in self._held

    def held(self, path: str, name: str, part: torch.Tensor) -> ShardLocation:
        """Return how a module's own tensor is sharded; SpreadModuleError if the layout is not known."""
        module: Any = base_module(self._modules[path])
        if not part.numel():
            return EVERYWHERE  # vLLM has repacked the weight and left an empty tensor
        if path in self._held or not isinstance(getattr(module, "quant_method", None), _PLAIN_WEIGHTS):
            raise SpreadModuleError.held(path, name)
        # A matrix is [out, in], a bias [out].
        axis = -1 if part.ndim == 1 else -2
        if isinstance(module, ColumnParallelLinear):
            layout = _columns(module)
        elif isinstance(module, VocabParallelEmbedding):
            layout = Layout((ShardPiece(module.num_embeddings_per_partition),))
        elif name == "bias":
            return EVERYWHERE  # a row-parallel layer's bias is added once, behind the sum
        else:
            layout, axis = Layout((ShardPiece(module.input_size_per_partition),)), -1
        layout = dataclasses.replace(layout, axis=axis)
        if layout.fits(part):
            return ShardLocation((layout,))
        raise SpreadModuleError.held(path, name)

    def _set_locations(self, path: str, entrance: ShardLocation | None, exit_: ShardLocation | None) -> None:
        """Record how input and output are sharded, None if unknown; replaces an earlier record."""
        for provider, place in ((f"{path}.input", entrance), (f"{path}.output", exit_)):
            if place is None:
                self._places.pop(provider, None)
                self._unknown.add(provider)
            else:
                self._places[provider] = place

    def _place_linear(self, path: str, module: nn.Module) -> None:
        """Record the layouts of a sharded linear layer's input and output; others are whole on each rank."""
        module = base_module(module)
        if isinstance(module, ColumnParallelLinear) and module.tp_size > 1:
            exit_ = EVERYWHERE if module.gather_output else ShardLocation(rest=_columns(module))
            self._set_locations(path, EVERYWHERE, exit_)
        elif isinstance(module, RowParallelLinear) and module.tp_size > 1:
            rows = ShardLocation((Layout((ShardPiece(module.input_size_per_partition),)),))
            self._set_locations(
                path,
                rows if module.input_is_parallel else EVERYWHERE,
                EVERYWHERE if module.reduce_results else None,
            )

    def _place_attention(self, points: ModelPoints, layer: int, block: BlockPoints) -> None:
        """Record the layouts of a layer's attention kernel, rotary embedding and norms of heads."""
        attention = points.layers[layer].get_submodule(block.attention)
        kernel: Any = points.attention(layer)
        path = self._paths.get(id(kernel))
        if path is None:
            path = f"{self._paths[id(attention)]}.{block.kernel.rpartition('.')[2]}"
            self._modules[path] = kernel
        if LATENT in block.leaves:
            # The projections into it are whole on each rank; what follows is known of linear layers only.
            for name in _LATENT_NORMS:
                norm = self._paths.get(id(getattr(attention, name, None)))
                if norm is not None:
                    self._set_locations(norm, EVERYWHERE, EVERYWHERE)
            self._spread.add(path)
            self._leave_unknown(attention)
            return
        queries, keys, values = self._heads(kernel, block)
        self._set_locations(path, ShardLocation((queries, keys, values)), ShardLocation(rest=queries))
        self._spread.add(path)
        for name, module in attention.named_children():
            module_path = self._paths.get(id(module))
            if module_path is None or module is kernel:
                continue
            if type(module).__module__.startswith(_ROTARY):
                self._set_locations(
                    module_path, ShardLocation((None, queries, keys)), ShardLocation((queries, keys))
                )
            elif name in _HEAD_NORMS:
                count, copies = kernel.num_heads, 1
                if name != "q_norm":
                    count, copies = kernel.num_kv_heads, self._kv_copies(kernel, block)
                heads = ShardLocation((Layout((ShardPiece(count, copies),), axis=-2),))
                self._set_locations(module_path, heads, heads)
        self._leave_unknown(attention)

    def _heads(self, kernel: Any, block: BlockPoints) -> tuple[Layout, Layout, Layout]:
        """Return the layouts of queries, keys and values; the kernel has one rank's number of heads."""
        copies = self._kv_copies(kernel, block)
        keys = Layout((ShardPiece(kernel.num_kv_heads * kernel.head_size, copies),))
        values = Layout((ShardPiece(kernel.num_kv_heads * kernel.head_size_v, copies),))
        return Layout((ShardPiece(kernel.num_heads * kernel.head_size),)), keys, values

    def _kv_copies(self, kernel: Any, block: BlockPoints) -> int:
        return max(1, int(kernel.num_kv_heads * self._size // block.num_kv_heads))

    def _place_mixer(self, layer: nn.Module, path: str) -> None:
        """Record a mixer's modules as unknown, but for linear layers.

        One whose ranks share a group of B and C has parts of other widths, in an order of its own.
        """
        mixer = base_module(layer.get_submodule(path))
        container = mixer if any(mixer.children()) else layer.get_submodule(path.rpartition(".")[0])
        for name, module in container.named_modules():
            module_path = self._paths.get(id(module))
            is_merged = isinstance(base_module(module), MergedColumnParallelLinear)
            if module_path is not None and name.rpartition(".")[2] in _IN_GROUPS and not is_merged:
                self._set_locations(module_path, EVERYWHERE, None)
                self._held.add(module_path)
        self._leave_unknown(container)

    def _place_mlp(self, layer: nn.Module, block: BlockPoints) -> None:
        """Record that an activation takes what ``up`` returns, and returns what ``down`` takes."""
        leaves = block.leaves
        if "mlp.up" not in leaves:
            self._leave_unknown(layer.get_submodule(block.mlp))
            return
        up, down = (layer.get_submodule(leaves[leaf].path) for leaf in ("mlp.up", "mlp.act"))
        parent = layer.get_submodule(leaves["mlp.act"].path.rpartition(".")[0])
        for module in parent.children():
            module_path = self._paths.get(id(module))
            if module_path is not None and type(module).__module__ in _ACTIVATIONS:
                before, after = self._paths[id(up)], self._paths[id(down)]
                self._set_locations(
                    module_path, self.location_of(f"{before}.output"), self.location_of(f"{after}.input")
                )
        if block.mlp:
            self._leave_unknown(layer.get_submodule(block.mlp))

    def _leave_unknown(self, container: nn.Module) -> None:
        """Record as unknown the layouts in an attention, a mixer or an MLP that were not determined.

        Its own tensors are among them, such as sinks, and those of norms over all heads, which load a part.
        """
        for module in container.modules():
            path = self._paths.get(id(module))
            is_whole = isinstance(base_module(module), ReplicatedLinear | ExpertChoice)
            if path is None or is_whole:
                continue
            parameters = [] if path in self._spread else [*module.parameters(recurse=False)]
            is_container = module is container
            if parameters and (
                is_container or any(hasattr(parameter, "weight_loader") for parameter in parameters)
            ):
                self._held.add(path)
            if not is_container:
                providers = {f"{path}.input", f"{path}.output"}
                self._unknown |= providers - self._places.keys()


def _columns(module: ColumnParallelLinear) -> Layout:
    """Return the layout of a column-parallel layer's output; a fused one is sharded matrix by matrix."""
    if isinstance(module, QKVParallelLinear):
        copies = module.num_kv_head_replicas
        return Layout(
            (
                ShardPiece(module.num_heads * module.head_size),
                ShardPiece(module.num_kv_heads * module.head_size, copies),
                ShardPiece(module.num_kv_heads * module.v_head_size, copies),
            )
        )
    if isinstance(module, MergedColumnParallelLinear):
        return Layout(tuple(ShardPiece(width // module.tp_size) for width in module.output_sizes))
    return Layout((ShardPiece(module.output_size_per_partition),))


def _is_parallel(module: nn.Module) -> bool:
    parallel = (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding)
    module = base_module(module)
    return isinstance(module, COLLECTIVE) or (isinstance(module, parallel) and module.tp_size > 1)
