from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nnsight_engine.core.leaves import ORDER
from nnsight_engine.families.places import Places

if TYPE_CHECKING:
    import torch


@dataclasses.dataclass(frozen=True, slots=True)
class EngineFamily:
    """One layout of decoder blocks in vLLM, shared by all the model classes it names.

    Attributes:
        model_classes: Names of the vLLM model classes with this layout, and of architectures that they serve
            under another name.
        architectures: Entries of the config's ``architectures`` to which the table applies; empty if the
            class alone decides. Needed for vLLM's Transformers backend, where one class serves all models.
        layers: Path of the list of decoder blocks; empty if the residual stream is not known.
        final_norm: Path of the final norm, empty if it is not known; the module may be None (OPT-350m).
        leaves: Location of each leaf of a layer, without the residual stream's ``input`` and ``output``. A
            block has those whose modules it has.
        kernel: Path, relative to the layer, of vLLM's ``Attention``, which receives queries and keys; empty
            if it is not known.
        order: The leaves in the order in which a block computes them.
        project_out: Path of a projection between the final norm and the unembedding, or empty.
        hidden_index: Position of the hidden states among the parameters of a block's ``forward``.
        hidden_name: Name of that parameter, which some models use to call blocks.
        has_stream: Whether blocks pass on one residual stream, which then has points.
        returns_none: Whether blocks return ``(stream, None)``.
        returns_residual: Whether blocks return ``(hidden, residual)``, whose sum is the residual stream.
            Otherwise blocks take and return the residual stream itself, as one tensor.
        has_unused_residual: Whether ``hidden`` is the whole stream, and nothing reads the second tensor,
            which is then replaced by zeros, so that the sum is right.
        sums_at_once: Whether attention and MLP are summed before they are reduced over tensor-parallel ranks,
            none of which then has their values. The table then holds for a single rank only.
        is_batched: Whether values have a leading axis of size 1 (``[1, tokens, width]``).
        is_qkv_interleaved: Whether the fused output is ``[heads, (q, k, v), head_dim]`` instead of all of q,
            then all of k, then all of v.
        has_query_gates: Whether the projection of queries returns a gate after each head's query.
        is_kernel_bare: Whether the attention module calls the kernel's ``forward`` directly, so that hooks on
            the kernel module do not run.
        has_pattern: Whether attention's probabilities are a point if queries and keys are.
        encoder: Path of the list of blocks of the vision encoder, which take and return the rows of patches;
            empty if it is not known.
        merged_patches: Field of the config with the number of patches of each side that become one row of the
            stream.
    """

    name: str
    model_classes: tuple[str, ...]
    layers: str
    final_norm: str
    leaves: Places
    kernel: str
    architectures: tuple[str, ...] = ()
    order: tuple[str, ...] = ORDER
    project_out: str = ""
    hidden_index: int = 0
    hidden_name: str = "hidden_states"
    has_stream: bool = True
    returns_none: bool = False
    returns_residual: bool = False
    has_unused_residual: bool = False
    sums_at_once: bool = False
    is_batched: bool = False
    is_qkv_interleaved: bool = False
    has_query_gates: bool = False
    is_kernel_bare: bool = False
    has_pattern: bool = True
    encoder: str = ""
    merged_patches: str = ""

    def hidden_key(self, args: Sequence[Any]) -> int | str:
        """Return where a call of a block has the hidden states: their position, or their name."""
        return self.hidden_index if self.hidden_index < len(args) else self.hidden_name

    def hidden_of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor:
        key = self.hidden_key(args)
        hidden: torch.Tensor = args[key] if isinstance(key, int) else kwargs[key]
        return hidden

    def residual_of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
        """Return the stream's second tensor among the arguments of a call of a block; None without it."""
        if not self.returns_residual:
            return None
        key = self.hidden_key(args)
        if isinstance(key, int) and key + 1 < len(args):
            residual: torch.Tensor | None = args[key + 1]
            return residual
        return kwargs.get("residual")
