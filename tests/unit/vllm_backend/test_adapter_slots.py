"""Adapters take slots in one order on all ranks, whatever the order of vLLM's sets."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.lora.request import LoRARequest

from nnsight_engine.vllm_backend.steps.adapters import AdaptersMixin


class Runner:
    given: list[int]

    def _set_active_loras(self, _prompts: Any, _rows: Any, adapters: Iterable[LoRARequest]) -> None:
        self.given = [one.lora_int_id for one in adapters]


class InterventionRunner(AdaptersMixin, Runner):  # type: ignore[misc] # as vLLM's runner
    pass


def test_the_adapters_of_a_step_are_put_into_slots_by_their_ids() -> None:
    runner = InterventionRunner()
    numbers = [7, 1, 30, 4, 12]
    adapters = {LoRARequest(f"adapter {number}", number, "/srv/adapter") for number in numbers}
    runner._set_active_loras((), (), adapters)
    assert runner.given == sorted(numbers)
