"""A number beyond a dtype is an error; what was infinite already stays so."""

from __future__ import annotations

import itertools

import pytest
import torch

from nnsight_engine import NNsight
from nnsight_engine.core.dtypes import LARGEST
from nnsight_engine.core.tensors import DTYPES, fitted, narrowed
from nnsight_engine.interleaving.batching import Batcher
from nnsight_engine.modeling.spread_rows import SpreadBatcher
from nnsight_engine.vllm_backend.traces.rows import FlatBatcher, RowSpan

FLOATS = ("float32", "bfloat16", "float16")


def test_the_largest_numbers_are_torchs() -> None:
    assert {name: torch.finfo(DTYPES[name]).max for name in FLOATS} == LARGEST


@pytest.mark.parametrize(("wide", "narrow"), list(itertools.product(FLOATS, FLOATS)))
def test_a_value_fits_or_is_refused(wide: str, narrow: str) -> None:
    values = torch.tensor([1.0, LARGEST[wide], float("inf"), float("nan")]).to(DTYPES[wide])
    if LARGEST[narrow] < LARGEST[wide]:
        with pytest.raises(ValueError, match="bfloat16 or float32"):
            narrowed(values, DTYPES[narrow], what="this")
    else:
        assert narrowed(values, DTYPES[narrow], what="this").isfinite().tolist() == [True, True, False, False]
    kept = fitted(values[[0, 2, 3]], torch.empty(0, dtype=DTYPES[narrow]))
    assert kept.dtype is DTYPES[narrow]
    assert kept.isfinite().tolist() == [True, False, False]


def test_values_without_numbers_are_let_through() -> None:
    shape = torch.empty(3, device="meta")
    assert narrowed(shape, torch.float16, what="this").shape == (3,)
    assert narrowed(torch.tensor([70000]), torch.float16, what="this").isinf().all()


@pytest.fixture
def large() -> NNsight:
    """A model whose values float16 cannot hold."""
    layer = torch.nn.Linear(2, 2, bias=False)
    torch.nn.init.constant_(layer.weight, 1e6)
    return NNsight(torch.nn.Sequential(layer, torch.nn.Identity()))


def test_a_cache_keeps_what_its_dtype_holds_or_says_so(large: NNsight) -> None:
    with pytest.raises(ValueError, match="bfloat16 or float32"), large.trace(torch.ones(1, 2)) as tracer:
        tracer.cache(dtype=torch.float16)
    with large.trace(torch.ones(1, 2)) as tracer:
        cache = tracer.cache(dtype=torch.bfloat16).save()
    (entry, *_) = cache.values()
    assert entry.output.isfinite().all()


@pytest.mark.parametrize("kind", [Batcher, SpreadBatcher, FlatBatcher])
def test_rows_that_take_the_place_of_the_models_fit_their_dtype(kind: type[Batcher]) -> None:
    batcher = FlatBatcher(RowSpan()) if kind is FlatBatcher else kind()
    batcher.groups, batcher.total_batch_size = [(1, 1)], 3
    batcher.current_value = torch.ones(3, 2, dtype=torch.float16)
    with pytest.raises(ValueError, match="has a larger one"):
        batcher.swap((1, 1), torch.full((1, 2), 1e5))
    assert torch.equal(batcher.current_value, torch.ones(3, 2, dtype=torch.float16))
    batcher.swap((1, 1), torch.full((1, 2), float("inf")))
    assert batcher.current_value.isinf().tolist() == [[False] * 2, [True] * 2, [False] * 2]
