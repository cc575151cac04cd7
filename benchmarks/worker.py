"""A process in which engines are compared: ``python -m benchmarks`` starts some for each mode.

It loads a plain engine, one of ours and a second plain one as control, each process in another
order, then runs every case once per repetition, each time in another order, and reports each pair
of numbers as it has it.
"""

from __future__ import annotations

import argparse
from typing import Final, TypeVar

from benchmarks.cases import Case
from benchmarks.engine import Engine
from benchmarks.measure import Measurer
from benchmarks.processes import EventPipe
from benchmarks.selection import add_options, check_options

Item = TypeVar("Item")

_ENGINES: Final = {"plain vLLM": False, "ours": True, "plain vLLM again, the control": False}
"""Whether each can intervene."""


def main() -> None:
    """Measure, and report through the event pipe."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=["eager", "compiled"], required=True)
    parser.add_argument("--events-fd", type=int, required=True)
    parser.add_argument("--process", type=int, required=True, help="its number among a table's")
    add_options(parser)
    args = parser.parse_args()
    cases = check_options(parser, args)
    events = EventPipe(args.events_fd)
    plain, ours, control = _engines(args, cases, events)
    measurer = Measurer(plain, ours, control, args.steps)
    events.send({"stage": "warming up"})
    for case in cases:
        measurer.measure(case)
    for repeat in range(args.repeats):
        for case in _rotated(cases, repeat * len(cases) // args.repeats):
            events.send({"stage": f"{case.variant.name}, {case.num_requests}"})
            pair = measurer.measure(case)
            events.send({"case": case.key, "plain": pair.plain, "ours": pair.ours})


def _engines(args: argparse.Namespace, cases: list[Case], events: EventPipe) -> list[Engine]:
    """Return a plain engine, one that can intervene, and the control."""
    engines: dict[str, Engine] = {}
    for name in _rotated(list(_ENGINES), args.process % len(_ENGINES)):
        events.send({"stage": f"loading {name}"})
        engines[name] = Engine(
            able=_ENGINES[name],
            eager=args.mode == "eager",
            max_num_seqs=max(case.num_requests for case in cases),
            max_step_tokens=max(case.num_requests * case.prompt_tokens for case in cases),
        )
    for engine in engines.values():
        engine.check_taps()
    return [engines[name] for name in _ENGINES]


def _rotated(items: list[Item], by: int) -> list[Item]:
    return items[by:] + items[:by]


if __name__ == "__main__":
    main()
