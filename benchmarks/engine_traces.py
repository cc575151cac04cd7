"""What a trace costs inside vLLM's engine, beside plain requests and hooks written by hand.

    python -m benchmarks.engine_traces [--mode eager|compiled] [--batches 8 32] [--repeats 15] [--profile]
        [--quick]

A step in which requests are traced, against the same step with hooks that keep the same values; and a whole
traced request, from its block to what it saved, against the same request without one. A compiled step runs no
hooks, so there the same step without traces is what it is compared with. What traces cost requests that have
none is ``make bench``'s to say: its engine is the same, and idle. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks.precision import DTYPE_NAME
from benchmarks.processes import ENVIRONMENT

os.environ.update(ENVIRONMENT)  # vLLM reads it when it is imported

import torch
from rich.console import Console
from rich.progress import Progress
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from benchmarks.machine import announced_machine
from benchmarks.traced import check_traced, submit_traced
from benchmarks.tracing.report import Report
from benchmarks.tracing.timing import CallsByTurns, Case, Measure, Row, Sample, measure, microseconds_over
from nnsight_engine import bundled_model_path, save
from nnsight_engine.vllm_backend.request_tracer import SentTrace
from nnsight_engine.vllm_backend.vllm import VLLM

_RESULTS: Final = Path(__file__).parent / "results"
_LAYER: Final = 15
_PROMPT_TOKENS: Final = 32
_WARM_STEPS: Final = 4
_TIMED_STEPS: Final = 24
_LOWEST_TOKEN: Final = 100
"""Ids below it are special tokens."""
_STEP_TARGET_US: Final = 1000.0
_REQUEST_TARGET_US: Final = 3000.0


class Decoding:
    """Batches of the same size, which decode for a while: plain, hooked, and with traced requests.

    Args:
        model: The engine.
        batch: Requests that decode at once.
        has_hooks: Whether its steps run hooks, as compiled ones do not.
    """

    def __init__(self, model: VLLM, batch: int, *, has_hooks: bool) -> None:
        """Warm up."""
        self._model = model
        self._core: Any = model.engine.llm_engine
        self._batch = batch
        self._count = 0
        self._sides: list[tuple[str, Callable[[], float]]] = [
            ("plain", lambda: self._run(0)),
            ("one traced", lambda: self._run(1)),
            ("all traced", lambda: self._run(batch)),
        ]
        if has_hooks:
            self._sides.insert(1, ("hook of one", lambda: self._hooked(1)))
            self._sides.insert(3, ("hook of all", lambda: self._hooked(batch)))
        self()

    def __call__(self) -> Sample:
        """Run one repetition; seconds of a step of each side."""
        sample = {name: side() for name, side in self._sides}
        self._sides.reverse()
        return sample

    def _prompt(self) -> list[int]:
        self._count += 1
        generator = torch.Generator().manual_seed(self._count)
        ids: list[int] = torch.randint(_LOWEST_TOKEN, 40_000, (_PROMPT_TOKENS,), generator=generator).tolist()
        return ids

    def _hooked(self, num_rows: int) -> float:
        layer = self._core.model_executor.driver_worker.worker.model_runner.get_model().model.layers[_LAYER]
        kept: list[Any] = []

        def keep(_module: Any, _inputs: Any, output: Any) -> None:
            hidden, residual = output
            kept.extend(hidden[row : row + 1] + residual[row : row + 1] for row in range(num_rows))

        handle = layer.register_forward_hook(keep)
        try:
            return self._run(0)
        finally:
            handle.remove()

    def _run(self, num_traced: int) -> float:
        """Return the seconds of a step of a batch whose first requests are traced."""
        sent = [self._submit(index < num_traced) for index in range(self._batch)]
        for _ in range(1 + _WARM_STEPS):
            self._core.step()
        start = time.perf_counter()
        for _ in range(_TIMED_STEPS):
            self._core.step()
        seconds = (time.perf_counter() - start) / _TIMED_STEPS
        outputs: dict[str, Any] = {}
        while self._core.has_unfinished_requests():
            outputs |= {output.request_id: output for output in self._core.step()}
        for trace in sent:
            if trace is not None:
                check_traced(self._model, trace, outputs[trace.key], 1)
        return seconds

    def _submit(self, is_traced: bool) -> SentTrace | None:  # noqa: FBT001 - one of two
        prompt, max_tokens = self._prompt(), 1 + _WARM_STEPS + _TIMED_STEPS + 1
        if is_traced:
            return submit_traced(self._model, prompt, max_tokens, [_LAYER])
        params = SamplingParams(
            temperature=0.0, ignore_eos=True, max_tokens=max_tokens, output_kind=RequestOutputKind.FINAL_ONLY
        )
        self._core.add_request(f"plain-{self._count}", {"prompt_token_ids": prompt}, params)
        return None


class Requests:
    """Whole requests of one token, idle: with a block that saves one value, and without."""

    def __init__(self, model: VLLM) -> None:
        """Warm up."""
        prompt = list(range(_LOWEST_TOKEN, _LOWEST_TOKEN + 8))
        params = SamplingParams(max_tokens=1, temperature=0.0)

        def ours() -> None:
            with model.trace(prompt, temperature=0.0):
                save(model.layers[_LAYER].output)

        sides = {
            "plain": lambda: model.engine.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False),
            "traced": ours,
        }
        self._whole = CallsByTurns(sides, repetition_s=1.0)
        self._decoding = Decoding(model, 1, has_hooks=False)

    def __call__(self) -> Sample:
        """Run one repetition."""
        steps = self._decoding()
        return {
            **self._whole(),
            "a plain step": steps["plain"],
            "a traced step": steps["one traced"],
        }


def cases(model: VLLM, batches: Sequence[int], *, has_hooks: bool) -> list[Case]:
    """Return what is compared."""

    def share(ours: str, hooks: str, count: int) -> Measure:
        other = hooks if has_hooks else "plain"
        return Measure(
            f"({ours} - {other}) / {count}, µs",
            lambda sample: 1e6 * (sample[ours] - sample[other]) / count,
            _STEP_TARGET_US,
        )

    steps = [
        Case(
            "a decode step, one layer's output saved",
            f"batch {batch}",
            partial(Decoding, model, batch, has_hooks=has_hooks),
            (share("one traced", "hook of one", 1), share("all traced", "hook of all", batch)),
        )
        for batch in batches
    ]
    around = Measure(
        "(traced - plain) - (a traced step - a plain step), µs",
        lambda one: 1e6 * (one["traced"] - one["plain"] - one["a traced step"] + one["a plain step"]),
        _REQUEST_TARGET_US,
    )
    whole = Case(
        "a request of one token, one value saved, engine idle: attaching and collecting, and all of it",
        "8 tokens",
        lambda: Requests(model),
        (around, microseconds_over("traced", "plain")),
    )
    return [*steps, whole]


def main() -> int:
    """Run the command line and return its exit status."""
    args = _arguments()
    console = Console()
    machine = announced_machine(console)
    is_eager = args.mode == "eager"
    model = VLLM(
        str(bundled_model_path()),
        dispatch=True,
        dtype=DTYPE_NAME,
        enforce_eager=is_eager,
        max_model_len=1024,
        max_num_seqs=max(args.batches),
        max_num_batched_tokens=2048,
    )
    if args.profile:
        _profile(model, max(args.batches))
        return 0
    rows: list[Row] = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("Traces", total=len(args.batches) + 1)
        for case in cases(model, args.batches, has_hooks=is_eager):
            rows += measure(case, args.repeats)
            progress.advance(task)
    method = _METHOD.format(
        mode=args.mode, compared=_COMPARED[args.mode], repeats=args.repeats, dtype=DTYPE_NAME
    )
    name, title = "engine-traces", "Traces inside vLLM's engine"
    if not is_eager:
        name, title = f"{name}-compiled", f"{title}, compiled"
    report = Report(machine, name, title, method, [args.repeats], rows)
    console.print(report.table())
    if args.quick:
        console.print("Quick: nothing was written.")
    else:
        console.print(f"Written to {report.write(args.output)}", soft_wrap=True)
    return 0


def _profile(model: VLLM, batch: int) -> None:
    """Print where the time of traced steps goes, and of whole traced requests."""
    decoding, whole = Decoding(model, batch, has_hooks=False), Requests(model)
    for name, act in (("steps", lambda: decoding._run(batch)), ("requests", whole)):  # noqa: SLF001 - its own part
        profile = cProfile.Profile()
        profile.runcall(act)
        print(f"\n{name}")
        pstats.Stats(profile).sort_stats("tottime").print_stats(35)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine_traces", description=__doc__)
    parser.add_argument("--mode", choices=sorted(_COMPARED), default="eager")
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 32], help="requests that run together")
    parser.add_argument("--repeats", type=int, default=15, help="repetitions of every case")
    parser.add_argument("--profile", action="store_true", help="print a profile instead")
    parser.add_argument("--quick", action="store_true", help="few repetitions, printed and not written")
    parser.add_argument("--output", type=Path, default=_RESULTS, help="folder of the tables")
    args = parser.parse_args()
    if args.quick:
        args.repeats = 3
    return args


_METHOD: Final = """\
SmolLM2-135M-Instruct in {dtype}, {mode}, one engine, in one process. Sides take turns: a batch decodes for
a while {compared}, with one request traced and with all traced. A figure is the median over {repeats}
repetitions of what is made of the sides' times in one; quartiles and the worst repetition beside it.
Made by `python -m benchmarks.engine_traces --mode {mode} --repeats {repeats}`."""

_COMPARED: Final = {
    "eager": "with all of its requests plain, with a hook that keeps the same rows",
    "compiled": "with all of its requests plain",
}


if __name__ == "__main__":
    sys.exit(main())
