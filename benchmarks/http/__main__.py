"""What our server costs beside vLLM's own, over HTTP: plain completions, streamed and whole.

    python -m benchmarks.http [--mode eager|compiled] [--concurrency 32] [--kinds whole streamed]
        [--repeats 7] [--keyed] [--quick]

Both servers are up, with the same engine arguments, and only one of them is loaded at a time, in short rounds
by turns; a second turn of vLLM's own against its first is the control. The client is a process of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import sys
import tempfile
from collections.abc import Iterator
from typing import Final

from rich.console import Console

from benchmarks.command import parsed, parser_of, show
from benchmarks.http.load import Outcome, Round
from benchmarks.line_process import LineProcess, LineProcessError
from benchmarks.machine import announced_machine
from benchmarks.precision import DTYPE_NAME
from benchmarks.processes import HUGE_PAGES
from benchmarks.servers import MODEL_NAME, ServerError, Side, command_of, created_key, own_folders, served_by
from benchmarks.tracing.report import Report
from benchmarks.tracing.timing import Case, Measure, Row, Sample, Sampler, measure
from nnsight_engine.modeling.bundled import bundled_model_path

_TARGET: Final = 0.97
_TARGET_CONCURRENCY: Final = 32
_AGAIN: Final = "vLLM's own again"
_OURS, _VLLM = map(str, Side)
_KINDS: Final = ["whole", "streamed"]
_WAVES: Final = 3
_FEWEST: Final = 4
_ENGINE: Final = ("--max-model-len", "1024", "--max-num-seqs", "64")


@dataclasses.dataclass(slots=True)
class Servers:
    """Both servers, and who loads them.

    Attributes:
        urls: Where each side listens.
        key: A key of ours, or nothing; vLLM's own pays no heed to it.
        client: Loads them.
        console: Told of each repetition.
        num_rounds: How many were run: the next one's prompts are others.
    """

    urls: dict[str, str]
    key: str
    client: LineProcess
    console: Console
    num_rounds: int = 0

    def sampler(self, concurrency: int, *, streams: bool) -> Sampler:
        """Return what runs repetitions, after one that does not count."""
        order = [_OURS, _VLLM, _AGAIN]

        def sample() -> Sample:
            self.num_rounds += 1
            outcomes = {}
            for name in order:
                asked = Round(
                    url=self.urls[_VLLM if name == _AGAIN else name],
                    model=MODEL_NAME,
                    key=self.key,
                    streams=streams,
                    concurrency=concurrency,
                    num_requests=max(_FEWEST, _WAVES * concurrency),
                    # The control's prompts are others, lest it finds them in the prefix cache.
                    seed=2 * self.num_rounds + (name == _AGAIN),
                )
                outcomes[name] = Outcome(**self.client.ask(**dataclasses.asdict(asked)))
            order.reverse()
            taken = _seconds(outcomes)
            self.console.print({name: f"{1e3 * seconds:.1f} ms" for name, seconds in taken.items()})
            return taken

        sample()
        return sample


def _seconds(outcomes: dict[str, Outcome]) -> Sample:
    sample: dict[str, float] = {}
    for name, outcome in outcomes.items():
        sample |= {name: outcome.request_s, f"{name}, first token": outcome.first_s}
        sample |= {f"{name}, between tokens": outcome.gap_s}
    return sample


def main() -> int:
    """Run the command line and return its exit status."""
    args = _arguments()
    console = Console()
    machine = announced_machine(console)
    try:
        with _both(args, console) as servers:
            rows = [
                row
                for concurrency in args.concurrency
                for kind in args.kinds
                for row in _measured(servers, concurrency, kind, args.repeats)
            ]
    except (ServerError, LineProcessError) as error:
        console.print(f"benchmarks: {error}", markup=False, soft_wrap=True)
        return 1
    name = f"http-{args.mode}{'-keyed' if args.keyed else ''}"
    report = Report(
        machine,
        name,
        f"Over HTTP, {args.mode}",
        _METHOD.format(**_described(args), dtype=DTYPE_NAME),
        [args.repeats],
        rows,
    )
    show(report, console, args)
    return 0


@contextlib.contextmanager
def _both(args: argparse.Namespace, console: Console) -> Iterator[Servers]:
    model = str(bundled_model_path())
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        variables = {**HUGE_PAGES, "VLLM_CPU_KVCACHE_SPACE": "1", **own_folders(folder)}
        key = created_key("one", variables) if args.keyed else ""
        urls = {}
        for side in Side:
            command = command_of(side, model, compiled=args.mode == "compiled", options=_ENGINE)
            server = stack.enter_context(served_by(side, command, variables))
            console.print(f"{side}: ready after {server.ready_s:.1f} s")
            urls[str(side)] = server.url
        yield Servers(urls, key, stack.enter_context(LineProcess("benchmarks.http.load")), console)


def _measured(servers: Servers, concurrency: int, kind: str, repeats: int) -> list[Row]:
    streams = kind == "streamed"
    make = functools.partial(servers.sampler, concurrency, streams=streams)
    target = _TARGET if concurrency == _TARGET_CONCURRENCY else None
    measures = [
        Measure(
            "requests/s, ours / vLLM's own",
            lambda sample: sample[_VLLM] / sample[_OURS],
            target,
            is_floor=True,
        ),
        Measure("requests/s, control", lambda sample: sample[_VLLM] / sample[_AGAIN], is_floor=True),
    ]
    measures += [_times("first token" if streams else "whole answer", ", first token")]
    measures += [_times("between tokens", ", between tokens")] if streams else []
    return measure(Case(f"{concurrency} at once", kind, make, tuple(measures)), repeats)


def _times(name: str, suffix: str) -> Measure:
    return Measure(
        f"{name}, ours / vLLM's own",
        lambda sample: sample[f"{_OURS}{suffix}"] / sample[f"{_VLLM}{suffix}"],
    )


def _arguments() -> argparse.Namespace:
    parser = parser_of("benchmarks.http", __doc__, repeats=7)
    parser.add_argument("--mode", choices=["eager", "compiled"], default="eager")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[_TARGET_CONCURRENCY])
    parser.add_argument("--kinds", choices=_KINDS, nargs="+", default=_KINDS, help="how answers come")
    parser.add_argument("--keyed", action="store_true", help="a key on our side, so that use is metered")
    return parsed(parser, quick_repeats=2)


def _described(args: argparse.Namespace) -> dict[str, object]:
    options = f"--mode {args.mode} --concurrency {' '.join(map(str, args.concurrency))}"
    options += "" if args.kinds == _KINDS else f" --kinds {' '.join(args.kinds)}"
    keyed = "with a key, so that requests are metered and audited" if args.keyed else "without keys"
    return {
        "mode": args.mode,
        "keyed": keyed,
        "repeats": args.repeats,
        "command": f"{options} --repeats {args.repeats}{' --keyed' if args.keyed else ''}",
    }


_METHOD: Final = """\
SmolLM2-135M-Instruct in {dtype}, {mode}, by `nnsight-engine serve`, {keyed}, and by vLLM's `api_server`, with
the same engine arguments and environment. Both are up, and loaded by turns; the client is a process of its
own on the same cores. A round is three requests for each that runs at once, prompts of 32 random tokens,
greedy answers of 16 to 48; the next one begins where one ends. Times are those of one request: of the round
divided by its requests, the median to its first token, the median between two of its tokens. Control: vLLM's
own server against itself. Medians over {repeats} repetitions of ratios within one. Made by
`python -m benchmarks.http {command}`."""


if __name__ == "__main__":
    sys.exit(main())
