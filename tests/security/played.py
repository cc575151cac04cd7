"""What a real sandbox process knows of a model that a test plays to it."""

from __future__ import annotations

from typing import Final

import torch

from api_schemas.request_traces import Trace
from nnsight_engine.vllm_backend.compat import EngineLimits
from nnsight_engine.vllm_backend.request_code import encoded_code
from nnsight_engine.vllm_backend.traces.block_adapters import BlockAdapters
from nnsight_engine.vllm_backend.traces.entry import TraceEntry

WIDTH: Final = 8
LAYERS: Final = 4
VOCABULARY: Final = 16
REFUSED: Final = "model.model.layers.3.mlp.output"
"""A place of which it is not known how the parts of several ranks make a whole."""
LIMITS: Final = EngineLimits(sandbox_bytes=2**28, sandbox_step_s=2.0)

PROMPT: Final = 3
NEIGHBOUR: Final = 2
"""Rows of another tenant in each step."""
STEPS: Final = 3

CODE: Final = """
import time
def busy():
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        pass
busy()
seen = [].save()
for step in tracer.iter[:3]:
    busy()
    first = model.layers[0].output.sum().item()
    busy()
    model.layers[1].output = model.lm_head(model.layers[1].output)
    busy()
    model.layers[2].output[:] *= 3
    busy()
    last = model.layers[3].output[-1].sum().item()
    model.logits.output[:, 5] = 7
    busy()
    token = model.samples.output.item()
    model.samples.output[:] = token + 1
    busy()
    seen.append((step, first, last, token))
busy()
"""
"""A block that reads, writes and calls a module, and computes for ``SECONDS`` between these."""


def code_lasting(seconds: float) -> str:
    """Return ``CODE`` with the seconds between its accesses."""
    return CODE.replace("SECONDS", str(seconds))


def entry_of(code: str, key: str = "key") -> TraceEntry:
    """Return the entry of a sandboxed request."""
    data = encoded_code(Trace(op="trace", code=code), "test")
    return TraceEntry(key, 0, 1, data, [{}], sandbox_of="tenant")


class _Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn = torch.nn.Identity()
        self.mlp = torch.nn.Identity()


class _Body(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = torch.nn.Identity()
        self.layers = torch.nn.ModuleList(_Layer() for _ in range(LAYERS))
        self.norm = torch.nn.Identity()


class Outline(torch.nn.Module):
    """What the process knows of a model."""

    def __init__(self) -> None:
        super().__init__()
        self.model = _Body()
        self.lm_head = torch.nn.Identity()


class Places:
    """The places whose values the process can have."""

    call_bytes = 2**26

    def __init__(self) -> None:
        names = [f"model.model.layers.{layer}" for layer in range(LAYERS)]
        names += [f"{name}.mlp" for name in names] + ["model.logits", "model.samples", "model.lm_head"]
        self.places = frozenset(f"{name}.{side}" for name in names for side in ("input", "output"))
        self.adapters = BlockAdapters()
