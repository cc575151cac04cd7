"""Runs blocks as a reader of messages does: here, or in a process that nothing confines (``main``).

The latter shows that attempts are real: they get what they are after where nothing holds them off.
"""

from __future__ import annotations

import sys
from types import CellType
from typing import Any

import torch

import nnsight_engine
from nnsight_engine import NNsight
from nnsight_engine.core.closure_cells import UNBOUND, content
from nnsight_engine.core.saves import SAVES, save
from nnsight_engine.envoys.tracers.interleaving import InterleavingTracer
from nnsight_engine.serialization import TRUSTED, SentBlock, decode_trace, encode_trace
from nnsight_engine.serialization.limits import Policy
from nnsight_engine.tracing.blocks import block_of_text
from nnsight_engine.tracing.tracer import Info, Tracer
from tests.security.attempts import every_attempt

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


def got_by(code: str, canary: str, port: int) -> Any:
    """Return what an attempt gets hold of where nothing holds it off; None if it ends with an error."""
    message = message_of(code, x=torch.arange(12.0).reshape(3, 4), canary=canary, port=port)
    try:
        held = run(message, NNsight(Small()), TRUSTED, torch.ones(1, 5))["held"]
    except BaseException:  # noqa: BLE001 - whatever it is
        return None
    return None if held.get("got") is UNBOUND else held.get("got")


def main() -> None:
    """Run the attempts that are named, and print the names of those that get something."""
    canary, port, *names = sys.argv[1:]
    for attempt in every_attempt():
        if attempt.name in names and got_by(attempt.code, canary, int(port)) is not None:
            print(attempt.name, flush=True)


if __name__ == "__main__":
    main()
