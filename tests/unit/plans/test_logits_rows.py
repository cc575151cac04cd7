"""Logits come from the engine where it has them, else from the unembedding, and go back where they belong."""

from __future__ import annotations

import numpy as np
import torch

from nnsight_engine.plans.step.logits_rows import LogitsRows

HIDDEN = torch.arange(12.0).reshape(6, 2)
CPU = torch.device("cpu")


def unembed(hidden: torch.Tensor) -> torch.Tensor:
    return hidden.repeat(1, 2)


def test_only_rows_not_sampled_from_are_computed() -> None:
    sample_rows = np.array([2, 5])
    origin = LogitsRows.of(np.array([0, 2, 4, 5]), sample_rows, CPU)
    asked: list[torch.Tensor] = []

    def compute(hidden: torch.Tensor) -> torch.Tensor:
        asked.append(hidden)
        return unembed(hidden)

    sampled = unembed(HIDDEN[sample_rows])
    logits = origin.gather(sampled, HIDDEN, compute)
    assert torch.equal(logits, unembed(HIDDEN[[0, 2, 4, 5]]))
    assert torch.equal(torch.cat(asked), HIDDEN[[0, 4]])
    origin.put_back(logits + 1, sampled)
    assert torch.equal(sampled, unembed(HIDDEN[[2, 5]]) + 1)


def test_some_of_the_sampled_rows_are_changed_and_the_others_are_not() -> None:
    sample_rows = np.array([0, 1, 3])
    origin = LogitsRows.of(np.array([1, 3]), sample_rows, CPU)
    sampled = unembed(HIDDEN[sample_rows])
    logits = origin.gather(sampled, HIDDEN, unembed)
    logits.zero_()
    assert sampled.any(dim=1).all()
    origin.put_back(logits, sampled)
    assert sampled.any(dim=1).tolist() == [True, False, False]


def test_another_batch_needs_other_rows() -> None:
    origin = LogitsRows.of(np.array([1]), np.array([0, 1, 2]), CPU)
    assert origin.holds(np.array([0, 1, 2]))
    assert not origin.holds(np.array([0, 1]))
    assert not origin.holds(np.array([1, 2, 3]))
