"""A process that runs attempts one after the other, as a server would, and says what came of each.

It is the process that attempts would get at: it holds a secret, and its parent looks whether its canaries
were touched. Its own answers are lines of JSON.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import traceback
from types import CellType
from typing import Any

import torch

import nnsight_engine
from nnsight_engine import NNsight
from nnsight_engine.core.closure_cells import UNBOUND, content
from nnsight_engine.core.saves import SAVES, save
from nnsight_engine.envoys.tracers.interleaving import InterleavingTracer
from nnsight_engine.sandbox.restricted import Budget, restricted_policy
from nnsight_engine.serialization import TRUSTED, SentBlock, decode_trace, encode_trace
from nnsight_engine.serialization.limits import Policy
from nnsight_engine.tracing.given_text import block_of_text
from nnsight_engine.tracing.tracer import Info, Tracer
from tests.security.attempts import every_attempt

SECRET = os.environ.get("NNSIGHT_ENGINE_TEST_SECRET", "")
BUDGET = Budget(max_steps=20_000, max_bytes=2**27, max_saved_bytes=2**25)
_MEMORY = 10 * 2**30
_GLOBALS = {"__name__": "__trace__", "nnsight_engine": nnsight_engine, "save": save, "torch": torch}


class Small(torch.nn.Module):
    """Two layers, 5 -> 10 -> 2."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer1 = torch.nn.Linear(5, 10)
        self.layer2 = torch.nn.Linear(10, 2)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer2(torch.relu(self.layer1(values)))
        return result


class _Theirs:
    def __init__(self, *name: str) -> None:
        self.name = name


def message_of(code: str, **variables: Any) -> bytes:
    """Return a block as it comes from a client; it finds ``model``, ``tracer`` and these variables."""
    block = block_of_text(code, "<attempt>", frozenset({"model", "tracer", *variables}))
    cells = {name: CellType(value) for name, value in variables.items()}
    cells |= {"model": CellType(_Theirs("model")), "tracer": CellType(_Theirs("tracer"))}
    sent = SentBlock(Info(block, cells, None, dict(_GLOBALS)), cells)
    return encode_trace([sent], reference=lambda value: value.name if type(value) is _Theirs else None)


def run(message: bytes, model: NNsight, policy: Policy, *inputs: Any, **options: Any) -> dict[str, Any]:
    """Run a received block beside the model; returns what its variables hold, and what was saved."""
    tracer = InterleavingTracer(model._run_module, model, *inputs, **options)
    resolve: dict[tuple[str, ...], Any] = {("model",): model, ("tracer",): tracer}
    info = decode_trace(message, resolve=resolve.__getitem__, policy=policy).blocks[0]
    tracer.info = info
    SAVES.enter()
    try:
        tracer.execute(Tracer().compile_on(info))
        held = {name: content(cell) for name, cell in info.variables.items()}
        kept = {name: value for name, value in held.items() if value is not UNBOUND and SAVES.keeps(value)}
    finally:
        SAVES.exit()
    return {"held": held, "saved": kept}


def _outcome(code: str, canary: str, port: int, policy: Policy) -> dict[str, Any]:
    model = NNsight(Small())
    try:
        message = message_of(code, x=torch.arange(12.0).reshape(3, 4), canary=canary, port=port)
        held = run(message, model, policy, torch.ones(1, 5))["held"]
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is told
        kinds = [kind.__name__ for kind in type(error).__mro__]
        return {"error": kinds, "text": "".join(traceback.format_exception_only(error))[:2000]}
    got = held.get("got")
    return {"got": False if got is UNBOUND or got is None else bool(_truth(got)), "text": str(got)[:2000]}


def _truth(value: Any) -> bool:
    try:
        return bool(value)
    except Exception:  # noqa: BLE001 - a tensor of many numbers is something
        return True


def main() -> None:
    """Run the attempts that the restricted compile holds off."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))  # so that a failure here fails here alone
    canary, port, ways = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    wanted = set(sys.argv[4:])
    for attempt in every_attempt():
        if attempt.ground == "restricted" and (not wanted or attempt.name in wanted):
            policy = TRUSTED if ways == "trusted" else restricted_policy(BUDGET)
            begin = time.monotonic()
            outcome = _outcome(attempt.code, canary, port, policy)
            outcome["seconds"] = round(time.monotonic() - begin, 2)
            print(json.dumps({"name": attempt.name, **outcome}), flush=True)


if __name__ == "__main__":
    main()
