"""What cases of one model are made of."""

from __future__ import annotations

import dataclasses
import random
from typing import TYPE_CHECKING, Any

from nnsight_engine.core.model_spec import ModelSpec
from nnsight_engine.plans.request_plan import NO_MARKERS, AnswerMarkers

if TYPE_CHECKING:
    from tests.e2e.fuzz.expected import Twin

Json = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class World:
    """What cases of one model are made of.

    Attributes:
        num_layers: Its layers.
        widths: By leaf, numbers of a position's value; layers' leaves without their layer.
        norms: By leaf, the usual norm of that value.
        vocab: Token ids that prompts are made of.
        texts: Tokens that a string says, by id.
        max_prompt: Tokens of the longest prompt.
        max_generated: Most tokens that are generated.
        markers: What stands for markers of the parts of answers.
    """

    num_layers: int
    widths: dict[str, int]
    norms: dict[str, float]
    vocab: list[int]
    texts: dict[int, str]
    max_prompt: int
    max_generated: int
    markers: AnswerMarkers = NO_MARKERS

    @classmethod
    def of(cls, spec: ModelSpec, twin: Twin, decode: Any, *, max_prompt: int, max_generated: int) -> World:
        own = {"embed.output", "norm.output", "logits"}
        leaves = [
            leaf
            for leaf in spec.leaves
            if leaf.name not in {"samples", "attn.pattern"}
            and (leaf.name in own or len(spec.layers_of(leaf.name)) == twin.num_layers)
        ]
        vocab = list(range(1, twin.model.config.vocab_size))
        names = {leaf.name: leaf.name if leaf.name in own else f"layers.*.{leaf.name}" for leaf in leaves}
        ids = random.Random(0).sample(vocab, 32)
        seen = twin.run(ids, len(ids), [{"op": "capture", "at": name} for name in names.values()]).seen
        norms = {
            leaf: max(float(rows.flatten(1).norm(dim=-1).mean()) for rows in seen[index].rows.values())
            for index, leaf in enumerate(names)
        }
        texts = {i: decode([i]) for i in random.Random(1).sample(vocab, min(200, len(vocab)))}
        texts = {i: text for i, text in texts.items() if text and twin.encode(text) == [i]}
        widths = {leaf.name: leaf.width for leaf in leaves}
        size = (max_prompt, max_generated)
        return cls(twin.num_layers, widths, norms, vocab, texts, *size, twin.markers)

    def at(self, leaf: str, layer: str | int) -> str:
        return leaf if leaf in {"embed.output", "norm.output", "logits"} else f"layers.{layer}.{leaf}"
