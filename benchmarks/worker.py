"""The process in which engines are compared: ``python -m benchmarks`` starts one for each mode.

It loads a plain engine, one of ours and a second plain one as control, then runs every case once
per repetition, each time in another order, and reports each pair of numbers as it has it.
"""

from __future__ import annotations

import argparse

from benchmarks.cases import Case, all_cases
from benchmarks.engine import Engine
from benchmarks.measure import Measurer
from benchmarks.processes import EventPipe


def main() -> None:
    """Measure, and report through the event pipe."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=["eager", "compiled"], required=True)
    parser.add_argument("--batches", type=int, nargs="+", required=True)
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--events-fd", type=int, required=True)
    args = parser.parse_args()
    events = EventPipe(args.events_fd)
    eager = args.mode == "eager"
    max_num_seqs = max(args.batches)
    events.send({"stage": "loading plain vLLM"})
    plain = Engine(able=False, eager=eager, max_num_seqs=max_num_seqs)
    events.send({"stage": "loading the engine able to intervene"})
    ours = Engine(able=True, eager=eager, max_num_seqs=max_num_seqs)
    events.send({"stage": "loading plain vLLM again, the control"})
    control = Engine(able=False, eager=eager, max_num_seqs=max_num_seqs)
    for engine in (plain, ours, control):
        engine.check_taps()
    measurer = Measurer(plain, ours, control, args.steps)
    cases = all_cases(args.batches)
    events.send({"stage": "warming up"})
    for case in cases:
        measurer.measure(case)
    for repeat in range(args.repeats):
        for case in _rotated(cases, repeat * len(cases) // args.repeats):
            events.send({"stage": f"{case.name}, {case.size}"})
            pair = measurer.measure(case)
            events.send({"case": case.key, "plain": pair.plain, "ours": pair.ours})


def _rotated(cases: list[Case], by: int) -> list[Case]:
    return cases[by:] + cases[:by]


if __name__ == "__main__":
    main()
