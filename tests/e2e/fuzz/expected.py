"""What an answer must hold, computed by transformers in one pass over the prompt and the generated tokens.

Operations are applied by ordinary hooks, each written from its line in docs/interventions.md, on all
positions at once: no cache, no batch, no chunks, no kernels. Positions past a read's own are computed under
the same writes, so a value at one position is what it was when the engine computed it, however it was split.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from nnsight_engine.plans.request_plan import AnswerMarkers
from tests.e2e.fuzz import wording
from tests.e2e.fuzz.vectors import numbers
from tests.families.edits import place
from tests.families.trees import tree_of

Op = dict[str, Any]


@dataclasses.dataclass(slots=True)
class Seen:
    """What one reading operation sees.

    Attributes:
        rows: By point, float32 ``[positions, width]`` at the positions that it names; a lens has logits.
        before: By point, what ``rows`` were computed from, for a probe: ``[positions, width]``.
    """

    rows: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    before: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(slots=True)
class Expected:
    """What transformers computes for one choice.

    Attributes:
        positions: By operation, the positions that it names among those fed to the model.
        seen: By reading operation, what it sees.
        logits: After all writes, float32 ``[positions, vocabulary]``.
    """

    positions: dict[int, list[int]]
    seen: dict[int, Seen]
    logits: torch.Tensor


class Twin:
    """A checkpoint in transformers, in one dtype.

    Args:
        path: The checkpoint.
        dtype: Of the weights: they are rounded to it.
        computes_in: Of the computation; float32 for the most exact values of rounded weights.
        encode: Token ids of a text.
    """

    def __init__(
        self, path: Path, dtype: torch.dtype, computes_in: torch.dtype, encode: wording.Encode
    ) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation="eager", local_files_only=True
        ).eval()
        self.model.to(computes_in)
        self.dtype = computes_in
        self.tree = tree_of(self.model.config)
        self.num_layers: int = self.model.config.num_hidden_layers
        self.encode = encode
        self.markers = _markers(encode, self.model.config.vocab_size)

    def run(self, ids: Sequence[int], prompt_len: int, operations: Sequence[Op]) -> Expected:
        """Return what the operations see and do on a text of which a part was the prompt."""
        parts = wording.answer_parts(ids, prompt_len, self.markers)
        positions = {
            index: [
                position
                for position, token in enumerate(ids)
                if wording.names(
                    op.get("where", {}), position, token, prompt_len, self.encode, parts[position]
                )
            ]
            for index, op in enumerate(operations)
        }
        seen: dict[int, Seen] = {index: Seen() for index in positions}
        acts: dict[str, list[_Act]] = {}
        for index, op in enumerate(operations):
            for number, point in enumerate(wording.points(op, self.num_layers)):
                act = _Act(op, point, number, positions[index], prompt_len, seen[index], self)
                acts.setdefault(wording.place(point), []).append(act)
        return Expected(positions, seen, self._forward(list(ids), acts))

    def unembed(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the logits of rows of the residual stream, as if they were the last layer's."""
        # The modules' own forward: hooks of this request are no part of the lens.
        normed = self.model.get_submodule(self.tree.norm).forward(rows)
        logits: torch.Tensor = self.model.lm_head.forward(normed)
        cap = getattr(self.model.config, "final_logit_softcapping", None)
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def _forward(self, ids: list[int], acts: dict[str, list[_Act]]) -> torch.Tensor:
        patterns = any(name.endswith("attn.pattern") for name in acts)
        handles = [
            place(self.model, name, _change(todo))
            for name, todo in acts.items()
            if name not in {"logits", "samples"} and not name.endswith("attn.pattern")
        ]
        try:
            with torch.no_grad():
                output = self.model(torch.tensor([ids]), use_cache=False, output_attentions=patterns)
                logits = output.logits[0]
                for act in acts.get("logits", ()):
                    logits = act.on(logits)
        finally:
            for handle in handles:
                handle.remove()
        for name, todo in acts.items():
            if name.endswith("attn.pattern"):
                for act in todo:
                    act.read(output.attentions[int(name.split(".")[1])][0].transpose(0, 1))
        found: torch.Tensor = logits.float()
        return found


@dataclasses.dataclass(frozen=True, slots=True)
class _Act:
    op: Op
    point: str
    number: int
    positions: list[int]
    prompt_len: int
    seen: Seen
    twin: Twin

    def on(self, value: torch.Tensor) -> torch.Tensor:
        """Read ``[tokens, width]``, or return it changed."""
        if self.op["op"] in {"capture", "probe", "logit_lens"}:
            self.read(value)
            return value
        changed = value.to(torch.promote_types(value.dtype, torch.float32), copy=True)
        if self.positions:
            changed[self.positions] = self._written(changed)
        return changed.to(value.dtype)

    def read(self, value: torch.Tensor) -> None:
        rows = value[self.positions]
        if self.op["op"] == "logit_lens":
            self.seen.rows[self.point] = self.twin.unembed(rows).float()
        elif self.op["op"] == "probe":
            weights = self._own("weights")
            self.seen.before[self.point] = rows.float()
            result = (rows.to(weights.dtype) @ weights).float() + self.op.get("bias", 0.0)
            self.seen.rows[self.point] = result.unsqueeze(-1)
        else:
            self.seen.rows[self.point] = rows.float()

    def _own(self, field: str) -> torch.Tensor:
        return self._numbers(self.op[field])

    def _numbers(self, drawn: Op) -> torch.Tensor:
        # Never less exact than float32, whatever the model computes in.
        tensor = numbers(drawn).to(torch.promote_types(self.twin.dtype, torch.float32))
        return tensor if tensor.ndim == 1 else tensor[self.number]

    def _written(self, value: torch.Tensor) -> torch.Tensor:
        x = value[self.positions]
        if self.op["op"] == "steer":
            return self._steered(x)
        if self.op["op"] == "patch":
            return self._patched()
        new = torch.zeros_like(x)
        if self.op.get("method") == "vector":
            new = self._own("vector").expand_as(x)
        elif self.op.get("method") == "mean":
            new = value[[p for p in self.positions if p < self.prompt_len]].mean(dim=0).expand_as(x)
        units = self.op.get("units")
        if units is None:
            return new
        x = x.clone()
        x[:, units] = new[:, units]
        return x

    def _steered(self, x: torch.Tensor) -> torch.Tensor:
        scale, mode = self.op.get("scale", 1.0), self.op.get("mode", "add")
        several = self.op.get("vectors", [])
        if several and mode == "project_out":
            span = torch.stack([self._numbers(one["vector"]) for one in several]).double()
            inside = torch.linalg.pinv(span, rtol=1e-6) @ span
            outside: torch.Tensor = x - scale * (x.double() @ inside).to(x.dtype)
            return outside
        if several:
            vector = sum((one["weight"] * self._numbers(one["vector"]) for one in several), torch.zeros(()))
        else:
            vector = self._own("vector")
        unit = vector / vector.norm()
        along = (x @ unit).unsqueeze(-1)
        changed: torch.Tensor
        match mode:
            case "add":
                changed = x + scale * vector
            case "norm_match":
                changed = x + scale * x.norm(dim=-1, keepdim=True) * unit
            case "project_out":
                changed = x - scale * along * unit
            case "clamp" if "low" in self.op or "high" in self.op:
                held = along.clamp(self.op.get("low"), self.op.get("high"))
                changed = x + (held - along) * unit
            case "clamp":
                changed = x + (scale - along) * unit
            case "affine":
                wanted = self.op.get("gain", 1.0) * along + self.op.get("offset", 0.0)
                changed = x + (wanted - along) * unit
            case _:
                changed = (scale * vector).expand_as(x)
        return changed

    def _patched(self) -> torch.Tensor:
        values = numbers(self.op["values"]).to(torch.promote_types(self.twin.dtype, torch.float32))
        rows = values if values.ndim == 2 else values[self.number]
        named = [wording.at_end(p, self.prompt_len) for p in self.op["where"]["positions"]]
        return torch.stack([rows[named.index(position)] for position in self.positions])


def _change(todo: list[_Act]) -> Any:
    """Return a change in place of a hook's rows, ``[..., *leaf shape]``."""

    def change(rows: torch.Tensor) -> None:
        num_tokens = rows.shape[1] if rows.shape[0] == 1 and rows.ndim > 2 else rows.shape[0]
        value = rows.reshape(num_tokens, -1)
        for act in todo:
            value = act.on(value)
        rows.copy_(value.reshape(rows.shape))

    return change


def _markers(encode: wording.Encode, vocab_size: int) -> AnswerMarkers:
    """Return frequent tokens, and others, in the place of markers: answers then have many short parts."""
    frequent = [token for text in (",", ".", "\n", " the", " and", " of", "1") for token in encode(text)[:1]]
    others = random.Random(3).sample(range(1, vocab_size), 14)
    parts = [1, 2, 3]
    begun_by = {token: parts[number % 3] for number, token in enumerate([*frequent, *others])}
    ends = frozenset(random.Random(4).sample(range(1, vocab_size), 3)) - begun_by.keys()
    return AnswerMarkers(begun_by, first=2, turn_ends=ends)
