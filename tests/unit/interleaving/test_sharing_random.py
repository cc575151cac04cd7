"""Random blocks with names in common read what they would if the invokes ran one by one."""

from __future__ import annotations

import torch

from tests.shared_names import Program
from tests.small_models import Rows

NUM_PROGRAMS = 80


def test_random_programs_read_what_they_would_one_by_one() -> None:
    model = Rows(torch.nn.Sequential(*(torch.nn.Identity() for _ in range(6))))
    given, num_passed_on = torch.ones(1, 2), 0
    for seed in range(NUM_PROGRAMS):
        program = Program(seed)
        num_passed_on += program.check(program.traced(model, given))
    assert num_passed_on > NUM_PROGRAMS / 2  # an error everywhere would be right, and of no use
