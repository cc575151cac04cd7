"""How fast we are beside other packages that read and change models, and beside PyTorch hooks.

The first run installs the peers into a virtual environment of their own, 4 GB in the user's cache directory.
A peer that cannot be installed, or cannot do something, has a row that says why.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file

from benchmarks.case import Case, Measure, NotMeasuredError, Plan, Sample, Sampler, difference, ratio
from benchmarks.peers import tasks
from benchmarks.peers.environment import (
    EnvironmentUnavailableError,
    default_environment,
    ensure_environment,
)
from benchmarks.peers.tasks import TASKS, Task
from benchmarks.precision import DTYPE_NAME
from benchmarks.process import ENVIRONMENT, Process, ProcessError
from nnsight_engine.modeling.bundled import bundled_model_path

OURS: Final = "ours"
_PEERS: Final = ("nnsight", "interp-engine")
_PLAIN: Final = "plain vLLM"
_HOOKS: Final = "PyTorch hooks"
_ANSWER_LIMIT_S: Final = 300
_METHOD: Final = """\
{threads} threads. Every side runs in a process of its own, the peers with our versions of torch and
transformers. Sides take turns, repetition by repetition. Below 1, ours is faster. Where the values that two
sides read differ by more than rounding there is no ratio. {rest}"""
_REST: Final = {
    "local": f"""\
In each process the library takes turns, call by call, with PyTorch hooks that do the same, registered and
removed each time: the reference. What a side adds to the reference in its own process is no part of the
ratio, since a library may slow down others' code in its process too. *MLP* is 12 linear layers of width 64 in
float32, *SmolLM2* SmolLM2-135M-Instruct in {DTYPE_NAME} with a prompt of 12 tokens.""",
    "serving": f"""\
SmolLM2-135M-Instruct in {DTYPE_NAME} in vLLM, uncompiled and on all cores; the reference is plain vLLM in a
process of its own, which generates as many tokens and reads nothing.""",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the sides' processes."""
    parser.add_argument("--threads", type=int, default=2, help="of torch, in each side")
    parser.add_argument(
        "--environment", type=Path, default=default_environment(), help="the peers' virtual environment"
    )
    parser.add_argument("--without-peers", action="store_true", help="references only; nothing is installed")


def plan(args: argparse.Namespace, stack: contextlib.ExitStack) -> Plan:
    """Start every side and return the cases."""
    part = args.table.removeprefix("peers-")
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    pythons, missing = _pythons(part, args)
    sides: dict[str, PeerSide] = {}
    for name, python in pythons.items():
        try:
            sides[name] = stack.enter_context(PeerSide(part, name, python, folder, args.threads))
        except NotMeasuredError as error:
            if name not in _PEERS:
                raise
            missing[name] = str(error)
    reference = sides.get(_PLAIN)
    peers = [side for name, side in sides.items() if name in _PEERS]
    cases = []
    for number, task in enumerate(TASKS[part]):
        for peer in [reference, *peers]:
            comparison = PeerComparison(number, task, sides[OURS], peer, reference, folder)
            cases.append(comparison.case())
    cases += [_missing(name, reason) for name, reason in missing.items()]
    versions = {name: version for side in sides.values() for name, version in side.versions.items()}
    method = _METHOD.format(threads=args.threads, rest=_REST[part])
    return Plan(args.table, "Beside peers", method, cases, versions=versions)


def _pythons(part: str, args: argparse.Namespace) -> tuple[dict[str, str], dict[str, str]]:
    """Return the interpreter of each side, and why others have none."""
    own = dict.fromkeys([OURS, *([_PLAIN] if part == "serving" else [])], sys.executable)
    if args.without_peers:
        return own, {}
    try:
        python = str(ensure_environment(args.environment))
    except EnvironmentUnavailableError as error:
        return own, dict.fromkeys(_PEERS, f"cannot be installed here: {error}")
    return own | dict.fromkeys(_PEERS, python), {}


def _missing(name: str, reason: str) -> Case:
    def make() -> Sampler:
        raise NotMeasuredError(reason)

    return Case("everything", name, make, (ratio(OURS, name),))


class PeerSide(Process):
    """The process of one side; what it cannot do is a ``NotMeasuredError``."""

    def __init__(self, part: str, name: str, python: str, folder: Path, threads: int) -> None:
        """Start it, and wait until its library and models are loaded."""
        # As vLLM comes, its engine has a process of its own; interp-engine supports no other way.
        variables: Mapping[str, str] = {}
        if part == "serving":
            variables = {**ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        self.name, model = name, str(bundled_model_path())
        arguments = [part, name, model, str(folder), str(threads)]
        try:
            super().__init__(
                "benchmarks.peers.side",
                *arguments,
                variables=variables,
                python=python,
                limit_s=_ANSWER_LIMIT_S,
            )
            self.versions: dict[str, str] = _checked(self.read())["versions"]
        except (ProcessError, NotMeasuredError) as error:
            self.close()
            raise NotMeasuredError(f"{name} does not run here: {error}") from error

    def request(self, **command: Any) -> Any:
        """Return its answer."""
        try:
            return _checked(self.ask(**command))
        except ProcessError as error:
            raise NotMeasuredError(f"{self.name}: {error}") from error


def _checked(answer: Any) -> Any:
    if "error" in answer:
        raise NotMeasuredError(answer["error"])
    return answer


class PeerComparison:
    """One task, ours beside a peer or the reference; no peer compares with the hooks in our process.

    Where no side is the reference of all, each measures hooks of its own beside its library. Sides leave the
    values that they read in ``folder``.
    """

    def __init__(
        self,
        number: int,
        task: Task,
        ours: PeerSide,
        peer: PeerSide | None,
        reference: PeerSide | None,
        folder: Path,
    ) -> None:
        """Prepare nothing yet."""
        self._number, self._task, self._folder = number, task, folder
        self._ours, self._peer, self._reference = ours, peer, reference
        self._apart = 0.0

    def case(self) -> Case:
        """Return the case."""
        if self._peer is None or self._peer is self._reference:
            name = _HOOKS if self._peer is None else self._peer.name
            measures: tuple[Measure, ...] = (ratio(OURS, name), difference(OURS, name))
        else:
            name = self._peer.name
            measures = (
                ratio(OURS, name),
                difference(OURS, "reference"),
                difference(name, "its reference"),
                Measure("difference of values read", lambda _sample: self._apart),
            )
        return Case(self._task.name, f"{self._task.size.name}, {name}", self.make, measures)

    def make(self) -> Sampler:
        """Prepare the sides and compare what they read."""
        sides = list(
            dict.fromkeys(one for one in (self._ours, self._peer, self._reference) if one is not None)
        )
        for side in sides:
            side.request(prepare=self._number, file=side.name)
        if self._peer is not None and self._peer is not self._reference:
            self._apart = self._difference(self._peer.name)

        def sample() -> Sample:
            times = {side.name: side.request(repeat=True)["seconds"] for side in sides}
            sides.reverse()
            return self._sample(times)

        return sample

    def _sample(self, times: Mapping[str, Mapping[str, float]]) -> Sample:
        ours = times[OURS]
        if self._peer is None:
            return {OURS: ours["library"], _HOOKS: ours["reference"]}
        peer = times[self._peer.name]
        if self._peer is self._reference:
            return {OURS: ours["library"], self._peer.name: peer["library"]}
        shared = None if self._reference is None else times[self._reference.name]["library"]
        return {
            OURS: ours["library"],
            self._peer.name: peer["library"],
            "reference": shared or ours["reference"],
            "its reference": shared or peer["reference"],
        }

    def _difference(self, peer: str) -> float:
        values, others = (self._values(name) for name in (OURS, peer))
        apart = tasks.difference(values, others)
        if apart is None:
            raise NotMeasuredError("values differ in shape")
        if apart > self._task.size.rounding:
            raise NotMeasuredError(f"values differ, by {apart:.2g} of the largest")
        return apart

    def _values(self, name: str) -> Sequence[torch.Tensor]:
        named = load_file(self._folder / name)
        return [named[str(index)] for index in range(len(named))]
