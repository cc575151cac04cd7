"""Models of which vLLM on a CPU gives other tokens than transformers, and the engine does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import Engine
from tests.families.edits import continued
from tests.families.first_difference import OTHERS, PROMPT_IDS, write
from tests.families.reference import load_reference_model

pytestmark = [pytest.mark.e2e, pytest.mark.heavy]

NUM_TOKENS = 6


@pytest.mark.parametrize("family", OTHERS)
def test_the_engine_gives_the_tokens_of_transformers(family: str, tmp_path: Path) -> None:
    checkpoint = write(family, tmp_path)
    reference: Any = load_reference_model(checkpoint)
    expected = continued(reference, PROMPT_IDS, NUM_TOKENS)
    with Engine(checkpoint, dtype="float32", max_model_len=128, num_gpu_blocks_override=128) as engine:
        reply = engine.ask(list(PROMPT_IDS), max_tokens=NUM_TOKENS)
    assert reply.token_ids == expected.token_ids
