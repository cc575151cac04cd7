"""A lens is the logits' softmax in float32, however many rows pass at once and whatever their dtype."""

from __future__ import annotations

import pytest
import torch

from nnsight_engine.plans.step.delivery import ROWS_AT_ONCE, LensReader

VOCABULARY = 97
TARGETS = (3, 3, 96)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, ROWS_AT_ONCE, 2 * ROWS_AT_ONCE + 5])
def test_likeliest_and_targets_are_those_of_the_softmax(rows: int, dtype: torch.dtype) -> None:
    logits = torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(rows)).to(dtype)
    expected = torch.log_softmax(logits.float(), dim=-1)
    ids, values, of_targets, ranks = LensReader().read(logits, 5, TARGETS)
    assert torch.equal(values, expected.topk(5, dim=-1).values)
    assert torch.equal(expected.gather(1, ids.long()), values)
    assert torch.equal(of_targets, expected[:, list(TARGETS)])
    for place, target in enumerate(TARGETS):
        assert torch.equal(ranks[:, place], (expected > expected[:, target : target + 1]).sum(-1).int() + 1)


def test_what_was_read_is_not_changed_by_what_is_read_next() -> None:
    reader = LensReader()
    first = reader.read(torch.arange(8.0).repeat(2, 1), 2, (0,))
    kept = [part.clone() for part in first]
    reader.read(torch.arange(8.0).flip(0).repeat(3, 1), 2, (0,))
    assert all(torch.equal(part, before) for part, before in zip(first, kept, strict=True))
