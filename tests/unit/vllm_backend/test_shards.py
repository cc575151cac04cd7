"""How ranks' parts make a whole, and a whole parts: pure tensors, no ranks."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Final

import pytest
import torch
from vllm.model_executor import layers

from nnsight_engine.vllm_backend.traces.shards import (
    COLLECTIVE,
    EVERYWHERE,
    Layout,
    ShardLocation,
    ShardPiece,
)

# Four heads of 2 columns; two key-value heads that two ranks have each; the same of values, 3 columns wide.
_KINDS: Final = ("all_reduce", "all_gather", "gather", "reduce_scatter")
QKV = Layout((ShardPiece(2), ShardPiece(2, copies=2), ShardPiece(3, copies=2)))


def parts_of(layout: Layout, whole: torch.Tensor, size: int) -> torch.Tensor:
    return torch.stack([layout.part(whole, rank, size) for rank in range(size)])


def test_a_fused_projection_is_put_together_matrix_by_matrix() -> None:
    columns = [[rank, 10 + rank // 2, 20 + rank // 2] for rank in range(4)]
    widths = (2, 2, 3)
    parts = torch.stack(
        [
            torch.cat(
                [torch.full((5, width), float(value)) for value, width in zip(own, widths, strict=True)], 1
            )
            for own in columns
        ]
    )
    whole = QKV.whole(parts)
    assert whole.shape == (5, 8 + 4 + 6)
    assert whole[0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 10, 10, 11, 11, 20, 20, 20, 21, 21, 21]
    assert torch.equal(parts_of(QKV, whole, 4), parts)


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("size", [2, 4])
def test_parts_of_a_whole_make_it_again(size: int, axis: int) -> None:
    layout = Layout((ShardPiece(3), ShardPiece(2), ShardPiece(4, copies=2)), axis=axis)
    shape = [3, 4]
    shape[axis] = layout.width_over(size)
    whole = torch.randn(6, *shape)
    assert torch.equal(layout.whole(parts_of(layout, whole, size)), whole)


def test_a_whole_of_another_width_is_refused() -> None:
    with pytest.raises(ValueError, match=r"18 columns here, got one of shape \(5, 19\)"):
        QKV.part(torch.zeros(5, 19), 0, 4)
    with pytest.raises(ValueError, match="18 columns"):
        QKV.part(torch.tensor(1.0), 0, 4)


def test_a_place_leaves_alone_what_every_rank_has() -> None:
    place = ShardLocation((None, Layout((ShardPiece(2),))))
    positions, queries = torch.arange(3), torch.randn(3, 4)
    cut = place.part(((positions, queries), {"scale": 2}), 1, 2)
    assert cut[0][0] is positions
    assert torch.equal(cut[0][1], queries[:, 2:])
    assert cut[1] == {"scale": 2}
    assert place.is_spread
    assert not EVERYWHERE.is_spread
    assert place.fits([positions, queries[:, 2:]])
    assert not place.fits([positions, queries])


def test_every_layer_of_vllm_that_waits_for_other_ranks_is_known() -> None:
    """One that a block could call on one rank alone would wait forever."""
    folder = Path(layers.__path__[0])
    waiting = {
        str(path.relative_to(folder))
        for path in folder.rglob("*.py")
        if any(f"tensor_model_parallel_{kind}(" in path.read_text() for kind in _KINDS)
    }
    known = {str(Path(inspect.getfile(kind)).relative_to(folder)) for kind in COLLECTIVE}
    parallel = {"linear.py", "vocab_parallel_embedding.py"}
    functions = {"fused_allreduce_gemma_rms_norm.py"}
    assert waiting == known | parallel | functions
