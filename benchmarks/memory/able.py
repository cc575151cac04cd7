"""A process whose memory is measured: an engine able to intervene, idle or after requests that did.

``python -m benchmarks memory`` starts it several times.
"""

from __future__ import annotations

from benchmarks.engine import Engine
from benchmarks.interventions import captured, every, steered
from benchmarks.memory import BATCH, MAX_TOKENS, PROMPT, ROUNDS, options, report_memory


def main() -> None:
    """Load, serve, report."""
    parser = options()
    parser.add_argument("--used", action="store_true", help="serve requests that steer and capture, too")
    args = parser.parse_args()
    engine = Engine(able=True, eager=True, max_num_seqs=BATCH, model=args.model)
    operations_of = [steered(every), captured(every, "generated")] if args.used else []
    for _ in range(ROUNDS):
        engine.finish([engine.submit(list(PROMPT), MAX_TOKENS, []) for _ in range(BATCH)])
        for one in operations_of:
            requests = [
                engine.submit(list(PROMPT), MAX_TOKENS, one(index, engine.shape)) for index in range(BATCH)
            ]
            engine.finish(requests)
            del requests
    report_memory(args.events_fd)


if __name__ == "__main__":
    main()
