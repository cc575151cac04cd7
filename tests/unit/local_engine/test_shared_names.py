"""Random blocks with names in common, run by an engine, read what they would one by one."""

from __future__ import annotations

import pytest

from tests.shared_names import Program
from tests.unit.local_engine.bench import TEXT, Bench

pytestmark = pytest.mark.heavy

NUM_PROGRAMS = 15


def test_random_programs_read_what_they_would_one_by_one(bench: Bench) -> None:
    num_layers = len(bench.client.model.layers)
    places = [f"model.model.layers[{n}].{part}" for n in range(num_layers) for part in ("self_attn", "mlp")]
    num_passed_on = 0
    for seed in range(NUM_PROGRAMS):
        program = Program(1000 + seed, places, sent=True)
        num_passed_on += program.check(program.traced(bench.client, TEXT, backend=bench.elsewhere()))
    assert num_passed_on > NUM_PROGRAMS / 2
