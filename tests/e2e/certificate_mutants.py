"""Faults put into the location of points on purpose, each of which a certificate must find."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
from torch import nn

from nnsight_engine.certificate.certificate import Status
from nnsight_engine.certificate.certify import compare
from nnsight_engine.certificate.measurements import CheckRequest
from nnsight_engine.certificate.reference_process import compute
from nnsight_engine.families.layout import EngineFamily, Place
from nnsight_engine.families.registry import engine_family
from nnsight_engine.plans.step.instructions import Code, Word
from nnsight_engine.vllm_backend import model_points
from nnsight_engine.vllm_backend.model_points import ModelPoints
from nnsight_engine.vllm_backend.vllm import VLLM
from tests.e2e.fuzz.mutants import change_instructions, leave_out
from tests.families.checkpoints import write_checkpoint

Patch = pytest.MonkeyPatch


@dataclasses.dataclass(frozen=True, slots=True)
class Mutant:
    """A fault of a family's engine, and the subjects and comparisons that must not be ok then."""

    family: str
    fault: Callable[[Patch], None]
    found: tuple[tuple[str, str], ...]


def _table(**changes: Any) -> Callable[[Patch], None]:
    """Return the fault that a family's table says something else."""

    def changed(class_name: str, architectures: Any) -> EngineFamily:
        family = engine_family(class_name, architectures)
        assert family is not None
        leaves: Mapping[str, Place] = changes.get("leaves", {})
        return dataclasses.replace(family, **{**changes, "leaves": {**family.leaves, **leaves}})

    return lambda patch: patch.setattr(model_points, "engine_family", changed)


def _layer_before(patch: Patch) -> None:
    """Hooks are placed one layer too early."""
    right = ModelPoints.locate

    def locate(self: ModelPoints, leaf: str, layer: int) -> tuple[nn.Module, Place]:
        return right(self, leaf, max(layer - 1, 0))

    patch.setattr(ModelPoints, "locate", locate)


def _no_write(patch: Patch) -> None:
    """The operation that adds does nothing."""
    change_instructions(
        patch, lambda _rows, words, _numbers: leave_out(words, words[:, Word.CODE] == Code.ADD)
    )


def _everywhere(*subjects: str) -> tuple[tuple[str, str], ...]:
    return tuple((subject, what) for subject in subjects for what in ("operations", "trace"))


_GPT2_QKV: Final = "attn.c_attn"
_GATE_UP: Final = "mlp.gate_up_proj"

MUTANTS: Final = {
    "none": Mutant("llama", lambda _: None, ()),
    "queries_and_keys_swapped": Mutant(
        "gpt2",
        _table(
            leaves={
                "attn.q": Place(_GPT2_QKV, "output", "k"),
                "attn.k": Place(_GPT2_QKV, "output", "q"),
            }
        ),
        (*_everywhere("layers.0.attn.q", "layers.0.attn.k"), ("layers.0.attn.q", "steer")),
    ),
    "queries_interleaved": Mutant(
        "gpt2",
        _table(is_qkv_interleaved=True),
        (*_everywhere("layers.0.attn.v"), ("layers.0.attn.v", "in place"), ("layers.0.attn.v", "assigned")),
    ),
    "residual_left_out": Mutant(
        "llama", _table(returns_residual=False), (("layers.0.output", "trace"), ("layers.0", "skip"))
    ),
    "residual_dropped": Mutant("llama", _table(has_unused_residual=True), (("logits", "plain"),)),
    "unused_residual_added": Mutant(
        "exaone4", _table(has_unused_residual=False), _everywhere("layers.2.output")
    ),
    "router_by_its_input": Mutant(
        "qwen3_moe",
        _table(leaves={"moe.router": Place("mlp.gate", "input")}),
        _everywhere("layers.0.moe.router"),
    ),
    "mlp_sides_swapped": Mutant(
        "llama",
        _table(leaves={"mlp.input": Place("mlp", "output"), "mlp.output": Place("mlp", "input")}),
        (*_everywhere("layers.0.mlp.input", "layers.0.mlp.output"), ("layers.0.mlp.output", "in place")),
    ),
    "gate_and_up_swapped": Mutant(
        "llama",
        _table(
            leaves={
                "mlp.gate": Place(_GATE_UP, "output", "up"),
                "mlp.up": Place(_GATE_UP, "output", "gate"),
            }
        ),
        (*_everywhere("layers.0.mlp.gate", "layers.0.mlp.up"), ("layers.0.mlp.up", "steer")),
    ),
    "a_layer_before": Mutant(
        "llama", _layer_before, (("layers.2.attn.q", "operations"), ("layers.2.mlp.output", "steer"))
    ),
    "no_write": Mutant("llama", _no_write, (("layers.0.output", "steer"), ("layers.2.attn.heads", "steer"))),
}


def check(name: str, folder: Path) -> list[tuple[str, str, str]]:
    """Return what a certificate finds wrong with a mutant: subject, kind of comparison and status."""
    mutant = MUTANTS[name]
    request = CheckRequest(str(write_checkpoint(mutant.family, folder / name)))
    reference = compute(request, lambda *_: None)
    mutant.fault(Patch())
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 128, "num_gpu_blocks_override": 128}
    model = VLLM(request.model, dispatch=True, enforce_eager=True, **options)
    findings = compare(model, request, reference).findings
    model.shutdown()
    return [
        (one.subject, one.what, one.verdict.status) for one in findings if one.verdict.status is not Status.OK
    ]
