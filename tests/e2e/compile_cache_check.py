"""Engines that compile with a cache which others have filled, each in a process of its own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams

from nnsight_engine.vllm_backend.compat import EngineLimits
from tests.e2e.harness import Ask, Engine, random_vector
from tests.families.checkpoints import write_checkpoint

PROMPT = [11, 7, 23, 5, 42]
NUM_TOKENS = 6
STEER = {"op": "steer", "at": "layers.1.output", "vector": random_vector(0, 128), "scale": 4.0}


def check(taps: str, folder: Path) -> dict[str, Any]:
    """Return what an engine with these taps (``none``: plain vLLM) generates, and its compile cache's key."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
    checkpoint = folder / "llama"
    if not checkpoint.exists():
        write_checkpoint("llama", checkpoint)
    options: dict[str, Any] = {
        "dtype": "float32",  # where tokens do not hang on how a kernel rounds
        "enforce_eager": False,
        "max_model_len": 128,
        "max_num_seqs": 4,
    }
    if taps == "none":
        llm = LLM(model=str(checkpoint), disable_log_stats=True, **options)
        params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
        (output,) = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
        found: dict[str, Any] = {"plain": list(output.outputs[0].token_ids)}
    else:
        engine = Engine(checkpoint, limits=EngineLimits(taps=taps), **options)
        llm = engine.llm
        (alone,), (steered,) = engine.run(
            [Ask(PROMPT, max_tokens=NUM_TOKENS), Ask(PROMPT, [STEER], max_tokens=NUM_TOKENS)]
        )
        assert steered.collected is not None
        found = {"plain": alone.token_ids, "steered": steered.token_ids, "tier": steered.collected.tier}
    return {**found, "key": llm.llm_engine.vllm_config.compute_hash()}
