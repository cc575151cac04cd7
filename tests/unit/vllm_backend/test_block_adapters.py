"""The LoRA adapter of a call: the block's own on its thread, the step's on the model's."""

from __future__ import annotations

import threading

import pytest
from torch import nn

from nnsight_engine.vllm_backend.model_points import base_module
from nnsight_engine.vllm_backend.traces.block_adapters import (
    NO_ADAPTER,
    NO_SLOT,
    BlockAdapters,
    block_adapters,
)
from nnsight_engine.vllm_backend.traces.errors import AdapterNotLoadedError


def test_a_thread_has_its_own_adapter() -> None:
    adapters = BlockAdapters(lambda: [7, None, 9])
    found: list[int | None] = []

    def block(adapter: int) -> None:
        adapters.enter(adapter)
        found.append(adapters.slot())

    for adapter in (9, 7, NO_ADAPTER):
        thread = threading.Thread(target=block, args=(adapter,))
        thread.start()
        thread.join()
    assert found == [2, 0, NO_SLOT]
    assert adapters.slot() is None, "the model's own calls follow the step"


def test_the_models_thread_has_one_for_the_length_of_a_call() -> None:
    adapters = BlockAdapters(lambda: [7])
    with adapters.using(7):
        assert adapters.slot() == 0
        with adapters.using(NO_ADAPTER):
            assert adapters.slot() == NO_SLOT
        assert adapters.current == 7
    assert adapters.slot() is None


def test_an_adapter_without_a_slot_is_an_error_with_what_to_do() -> None:
    adapters = BlockAdapters(lambda: [7])
    adapters.enter(8)
    with pytest.raises(AdapterNotLoadedError, match="max_loras"):
        adapters.slot()


def test_a_model_without_adapters_has_plain_modules() -> None:
    linear = nn.Linear(2, 2)
    assert base_module(linear) is linear
    assert block_adapters(linear).slot() is None
