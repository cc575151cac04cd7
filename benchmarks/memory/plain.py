"""A process whose memory is measured: vLLM as it comes, and nothing of ours imported.

``python -m benchmarks memory`` starts it several times.
"""

from __future__ import annotations

from vllm import LLM, SamplingParams

from benchmarks.engine_arguments import engine_arguments
from benchmarks.memory import BATCH, MAX_TOKENS, PROMPT, ROUNDS, options, report_memory


def main() -> None:
    """Load, serve, report."""
    args = options().parse_args()
    engine = LLM(model=args.model, async_scheduling=False, **engine_arguments(eager=True, max_num_seqs=BATCH))
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    for _ in range(ROUNDS):
        engine.generate([{"prompt_token_ids": list(PROMPT)}] * BATCH, params, use_tqdm=False)
    report_memory(args.events_fd)


if __name__ == "__main__":
    main()
