"""Random blocks with names in common read what they would if the invokes ran one by one."""

from __future__ import annotations

from typing import Any

import torch

from nnsight_engine import NNsight
from tests.shared_names import Program

NUM_PROGRAMS = 80


class Batching(NNsight):
    """Stacks the rows of its invokes."""

    def _batch(self, batched_input: Any, *inputs: Any, **kwargs: Any) -> Any:
        return (torch.cat([batched_input[0][0], inputs[0]]),), {}


def test_random_programs_read_what_they_would_one_by_one() -> None:
    model = Batching(torch.nn.Sequential(*(torch.nn.Identity() for _ in range(6))))
    given, num_passed_on = torch.ones(1, 2), 0
    for seed in range(NUM_PROGRAMS):
        program = Program(seed)
        num_passed_on += program.check(program.traced(model, given))
    assert num_passed_on > NUM_PROGRAMS / 2  # an error everywhere would be right, and of no use
