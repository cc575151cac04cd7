"""How long the server takes from its command to its first token, beside vLLM's own server.

    python -m benchmarks.startup [--repeats 5] [--quick] [-- --compile] [any engine argument of vLLM]

The bundled model is converted before the clock starts, as it is on every start but the first. With
``--compile`` ours is started eager too, and the difference is what compiling costs at each start.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Sequence
from typing import Final

import httpx
from rich.console import Console

from benchmarks.command import parser_of, show
from benchmarks.machine import announced_machine
from benchmarks.precision import DTYPE_NAME
from benchmarks.servers import MODEL_NAME, ServerError, Side, command_of, served_by
from benchmarks.tracing.report import Report
from benchmarks.tracing.timing import Case, Measure, Sample, Sampler, measure, ratio
from nnsight_engine.modeling.bundled import bundled_model_path

_TARGET_S: Final = 20.0
_EAGER: Final = "ours, eager"
_TOKEN_LIMIT_S: Final = 60.0


def main() -> int:
    """Run the command line and return its exit status."""
    args, options = _arguments()
    console = Console()
    machine = announced_machine(console)
    starts = Starts(str(bundled_model_path()), options, compiled=args.compile, console=console)
    mode = "compiled" if args.compile else "eager"
    case = Case("from the command to the first token", mode, starts.make, _measures(compiled=args.compile))
    try:
        rows = measure(case, args.repeats)
    except ServerError as error:
        console.print(f"benchmarks: {error}", markup=False, soft_wrap=True)
        return 1
    method = _METHOD.format(
        repeats=args.repeats, more=" -- --compile" if args.compile else "", dtype=DTYPE_NAME
    )
    report = Report(machine, f"startup-{mode}", f"Start-up, {mode}", method, [args.repeats], rows)
    show(report, console, args)
    return 0


class Starts:
    """Starts of each side by turns.

    Args:
        model: What is served.
        options: More engine arguments, for every side.
        compiled: Whether the engine is compiled.
        console: Told of each start.
    """

    def __init__(self, model: str, options: Sequence[str], *, compiled: bool, console: Console) -> None:
        """Name the sides."""
        self._console = console
        start = functools.partial(_started, model=model, options=options)
        self._sides = {str(side): functools.partial(start, side, compiled=compiled) for side in Side}
        if compiled:
            self._sides[_EAGER] = functools.partial(start, Side.OURS, compiled=False)
        self._order = list(self._sides)

    def make(self) -> Sampler:
        """Start ours once: what the disk holds of it shall be in memory for every start that counts."""
        self._sides[str(Side.OURS)]()
        return self._sample

    def _sample(self) -> Sample:
        sample: dict[str, float] = {}
        for name in self._order:
            listening_s, ready_s, token_s = self._sides[name]()
            sample |= {name: token_s, f"{name}, ready": ready_s, f"{name}, listening": listening_s}
            self._console.print(
                f"{name}: listening after {listening_s:.1f} s, ready after {ready_s:.1f} s, "
                f"a token after {token_s:.1f} s"
            )
        self._order.reverse()
        return sample


def _started(side: Side, *, model: str, options: Sequence[str], compiled: bool) -> tuple[float, float, float]:
    """Start a server and stop it; return when it listened, was ready and had answered with a token."""
    with served_by(side, command_of(side, model, compiled=compiled, options=options)) as server:
        body = {"model": MODEL_NAME, "prompt": [1], "max_tokens": 1}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=_TOKEN_LIMIT_S)
        answer.raise_for_status()
        return server.listening_s, server.ready_s, server.seconds()


def _measures(*, compiled: bool) -> tuple[Measure, ...]:
    ours, vllm = map(str, (Side.OURS, Side.VLLM))
    against = ratio(ours, vllm)
    if not compiled:
        return (Measure("ours, seconds", lambda sample: sample[ours], _TARGET_S), against)
    return (
        Measure("ours, seconds", lambda sample: sample[ours]),
        Measure("price of compiling, seconds", lambda sample: sample[ours] - sample[_EAGER]),
        against,
    )


def _arguments() -> tuple[argparse.Namespace, list[str]]:
    parser = parser_of("benchmarks.startup", __doc__, repeats=5)
    parser.add_argument("--compile", action="store_true", help="compiled engines, and what that costs")
    # What follows "--" belongs to the servers; "--compile" among it is what the server calls it too.
    given = [argument for argument in sys.argv[1:] if argument != "--"]
    args, options = parser.parse_known_args(given)
    if args.quick:
        args.repeats = 1
    return args, options


_METHOD: Final = """\
`nnsight-engine serve` and vLLM's `api_server` with SmolLM2-135M-Instruct in {dtype} and the same environment
and engine arguments, started by turns, each alone: seconds from the command until a completion of one token
is answered, polled every 50 ms; "listening" is the first answer of any kind, "ready" what readiness checks
see.
The first start is not counted. Medians over {repeats} repetitions. Made by
`python -m benchmarks.startup --repeats {repeats}{more}`."""


if __name__ == "__main__":
    sys.exit(main())
