"""What vLLM by itself generates on engines of several kinds, without anything of this project.

``python -m tests.e2e.plain_kinds_check FOLDER KIND...`` writes ``report.json`` into the folder, which holds
the model: by kind the tokens, how many drafts were made and accepted, and how long it took.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, Final

from vllm import LLM, SamplingParams

from tests.e2e.check_process import REPORT
from tests.e2e.engine_kinds import EngineKind, prepared

MODEL: Final = "model"
NUM_TOKENS: Final = 10
PROMPTS: Final = ([11, 7, 23, 5, 42], [3, 9] * 15, [30, 31, 32])
_DRAFTS: Final = {
    "vllm:spec_decode_num_draft_tokens": "drafted",
    "vllm:spec_decode_num_accepted_tokens": "accepted",
}


def generate(kind: EngineKind, model: Path) -> dict[str, Any]:
    """Return what an engine of a kind generates greedily."""
    began = time.monotonic()
    with prepared(kind):
        engine = LLM(
            model=str(model),
            dtype="float32",
            enforce_eager=True,
            max_model_len=128,
            max_num_seqs=8,
            max_num_batched_tokens=64,
            disable_log_stats=False,
            **kind.options(model),
        )
    config = engine.llm_engine.vllm_config
    started = time.monotonic()
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = engine.generate(prompts, params, use_tqdm=False)
    found = {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "is_v2": config.use_v2_model_runner,
        "is_async": config.scheduler_config.async_scheduling,
        "starting_s": started - began,
        "generating_s": time.monotonic() - started,
    }
    found |= {_DRAFTS[metric.name]: metric.value for metric in engine.get_metrics() if metric.name in _DRAFTS}
    engine.llm_engine.engine_core.shutdown()
    return found


def main(folder: Path, names: list[str]) -> None:
    """Start the engines one after another, and report."""
    report = {name: generate(EngineKind.named(name), folder / MODEL) for name in names}
    (folder / REPORT).write_text(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
