"""Limits that the worker enforces."""

from __future__ import annotations

import pytest

from nnsight_engine.core.errors import UnsupportedOptionError
from nnsight_engine.vllm_backend.compat import EngineLimits


@pytest.mark.parametrize("value", ["restricted", "", "proces", "PROCESS"])
def test_a_sandbox_is_a_process_or_off(value: str) -> None:
    assert EngineLimits().sandbox == "process"
    assert EngineLimits(sandbox="off").sandbox == "off"
    with pytest.raises(UnsupportedOptionError, match=r"'process'.*'off'"):
        EngineLimits(sandbox=value)
