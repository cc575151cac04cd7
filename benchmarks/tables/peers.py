"""Traces and requests compared with other packages, and with PyTorch hooks or plain vLLM.

Every side runs in a process of its own, the peers in a virtual environment with our versions of torch,
transformers and vLLM, which the first run installs: 4 GB in the user's cache directory. Sides take turns,
repetition by repetition. Below 1, ours is faster. Where the values that two sides read differ by more than
rounding there is no ratio. A peer that cannot be installed, or cannot do something, has a row with the
reason.

`peers-local`: in each process the library takes turns, call by call, with PyTorch hooks that do the same,
registered and removed each time: the reference. The difference to the reference in its own process is no
part of the ratio, since a library may slow down others' code in its process too. *MLP* is 12 linear layers
of width 64 in float32, *SmolLM2* SmolLM2-135M-Instruct with a prompt of 12 tokens. `peers-serving`: the
model in vLLM, uncompiled; the reference is plain vLLM, which generates as many tokens and reads nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks.case import BenchmarkCase, Measure, NotMeasuredError, Plan, Sampler, difference, ratio
from benchmarks.peers import tasks
from benchmarks.peers.environment import (
    EnvironmentUnavailableError,
    default_environment,
    ensure_environment,
)
from benchmarks.peers.tasks import TASKS, Array, Task
from benchmarks.process import ChildObject, ProcessError
from benchmarks.tables import ENVIRONMENT
from benchmarks.turns import by_turns
from nnsight_engine.modeling.bundled import bundled_model_path

OURS: Final = "ours"
_PEERS: Final = ("nnsight", "interp-engine")
_PLAIN: Final = "plain vLLM"
_ANSWER_LIMIT_S: Final = 300


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
    pythons, missing = _pythons(part, args)
    sides: dict[str, PeerSide] = {}
    for name, python in pythons.items():
        try:
            sides[name] = PeerSide(part, name, python, args.threads, stack)
        except NotMeasuredError as error:
            if name not in _PEERS:
                raise
            missing[name] = str(error)
    reference = sides.get(_PLAIN)
    peers = [side for name, side in sides.items() if name in _PEERS]
    cases = [
        comparison(number, task, sides[OURS], peer, reference)
        for number, task in enumerate(TASKS[part])
        for peer in [reference, *peers]
    ]
    for name, reason in missing.items():
        make = partial(_refuse, f"{name} does not run here: {reason}")
        cases.append(BenchmarkCase("everything", name, make, (ratio(OURS, name),)))
    versions = {name: version for side in sides.values() for name, version in side.versions.items()}
    return Plan(cases, versions=versions)


def _pythons(part: str, args: argparse.Namespace) -> tuple[dict[str, str], dict[str, str]]:
    """Return the interpreter of each side, and why others have none."""
    own = dict.fromkeys([OURS, *([_PLAIN] if part == "serving" else [])], sys.executable)
    if args.without_peers:
        return own, {}
    missing = {"nnsight": "its vLLM model needs a GPU"} if part == "serving" else {}
    try:
        python = str(ensure_environment(args.environment))
    except EnvironmentUnavailableError as error:
        return own, {**dict.fromkeys(_PEERS, str(error)), **missing}
    return own | {name: python for name in _PEERS if name not in missing}, missing


def _refuse(reason: str) -> Sampler:
    raise NotMeasuredError(reason)


class PeerSide:
    """The process of one side; it has loaded its library and models.

    Raises:
        NotMeasuredError: It cannot.
    """

    def __init__(self, part: str, name: str, python: str, threads: int, stack: contextlib.ExitStack) -> None:
        # As vLLM comes, its engine has a process of its own; interp-engine supports no other way.
        variables = {**ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"} if part == "serving" else {}
        self.name = name
        arguments = (part, name, str(bundled_model_path()), threads)
        try:
            self._child = stack.enter_context(
                ChildObject(
                    "benchmarks.peers.side:compared_side",
                    *arguments,
                    variables=variables,
                    python=python,
                    limit_s=_ANSWER_LIMIT_S,
                )
            )
        except ProcessError as error:
            raise NotMeasuredError(str(error)) from error
        self.versions: dict[str, str] = self.request("versions")

    def request(self, method: str, *arguments: Any) -> Any:
        """Call a method of ``ComparedSide``; an error is a ``NotMeasuredError``."""
        try:
            value, error = self._child.call("answer", method, *arguments)
        except ProcessError as failure:
            raise NotMeasuredError(str(failure)) from failure
        if error:
            raise NotMeasuredError(error)
        return value


def comparison(
    number: int, task: Task, ours: PeerSide, peer: PeerSide | None, reference: PeerSide | None
) -> BenchmarkCase:
    """Return the case of one task: ours compared with a peer, or with the reference.

    The reference of all is a side, or hooks in each side's process where there is no such side.
    """
    sides = list(dict.fromkeys(one for one in (ours, peer, reference) if one is not None))

    def base_of(name: str) -> str:
        return f"{name} (hooks)" if reference is None else reference.name

    def make() -> Sampler:
        values = {side.name: side.request("prepare", number) for side in sides}
        if peer is not None and peer is not reference:
            _check_same(values[OURS], values[peer.name], task.size.rounding)
        return by_turns({side.name: partial(side.request, "repeat") for side in sides}, num_warmups=0)

    name = base_of(OURS) if peer is None else peer.name
    measures: tuple[Measure, ...] = (ratio(OURS, name), difference(OURS, base_of(OURS)))
    if peer is not None and peer is not reference:
        measures += (difference(name, base_of(name)),)
    return BenchmarkCase(task.name, f"{task.size.name}, {name}", make, measures)


def _check_same(values: Sequence[Array], others: Sequence[Array], rounding: float) -> None:
    apart = tasks.difference(values, others)
    if apart is None:
        raise NotMeasuredError("values differ in shape")
    if apart > rounding:
        raise NotMeasuredError(f"values differ, by {apart:.2g} of the largest")
