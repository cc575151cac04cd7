"""The import path of ``VLLM`` that nnsight's users know."""

from __future__ import annotations

import subprocess
import sys

import pytest

from nnsight_engine.modeling import vllm


def test_importing_the_module_does_not_load_vllm() -> None:
    program = "import nnsight_engine.modeling.vllm, sys\nprint('vllm' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "False"


def test_a_name_that_is_not_there_is_said() -> None:
    with pytest.raises(AttributeError, match="it offers VLLM"):
        _ = vllm.LLM  # type: ignore[attr-defined] # the point of the test
