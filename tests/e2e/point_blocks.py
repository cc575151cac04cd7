"""Blocks that read and write at standard points, and give the same on ``LanguageModel`` and on vLLM.

vLLM's Transformers backend (GPT-NeoX) changes transformers' classes for the whole process: all that
``LanguageModel`` computes is to be computed before the first engine starts.
"""

from __future__ import annotations

import operator
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import torch
from vllm.lora.request import LoRARequest

from nnsight_engine import LanguageModel, save
from nnsight_engine.vllm_backend.vllm import VLLM
from tests.families.moves import LAYER, points_of_a_layer

PROMPT: Final = [45, 257, 80, 301, 77, 78, 260, 90]
OTHER: Final = [91, 120, 33, 44, 260, 18, 77, 45]
NUM_TOKENS: Final = 4
_RELATIVE: Final = 1e-4
REFUSED: Final = "refused"
"""The key of ``force_experts`` for models whose experts cannot be forced."""
_UNKNOWN_WEIGHTS: Final = (
    "weights that this model gives to other experts are not",
    "of models that can be given others",
)
"""The two engines' reasons for it."""

Values = dict[str, Any]


class AdaptedVLLM(VLLM):
    """An engine whose blocks run with a LoRA adapter."""

    adapter: LoRARequest | None


def opened(model: Any, prompt: list[int] | None, num_tokens: int = 1) -> Any:
    """Open a trace that generates so many tokens, without a prompt for invokes."""
    inputs = () if prompt is None else (given(model, prompt),)
    if isinstance(model, VLLM):
        adapter: dict[str, Any] = {"lora_request": model.adapter} if isinstance(model, AdaptedVLLM) else {}
        return model.trace(*inputs, max_tokens=num_tokens, temperature=0.0, ignore_eos=True, **adapter)
    if num_tokens == 1:
        return model.trace(*inputs)
    return model.trace(  # what `with model.generate(...)` does, which only works in the statement itself
        *inputs,
        fn=model.__nnsight_generate__,
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
    )


def given(model: Any, prompt: list[int]) -> Any:
    return prompt if isinstance(model, VLLM) else torch.tensor([prompt])


def writable(model: Any) -> list[str]:
    """Return a layer's points, and those of the whole model, that can be written."""
    return [
        name
        for name in points_of_a_layer(model.points())
        if not name.endswith(("attn.pattern", "moe.experts", "mixer.state"))
    ]


def whole(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) else output


def after(model: Any, layer: int) -> Any:
    """Return the residual stream after a layer, or its MLP's output where there are several streams."""
    if f"layers.{layer}.output" in model.points:
        return whole(model.layers[layer].output)
    return model.points[f"layers.{layer}.mlp.output"]


def mixing(model: Any) -> tuple[str, int]:
    """Return the point of a layer's heads, else of its mixer, else its output, and the number of its axes."""
    axes = {"attn.heads": 2, "mixer.output": 1, "output": 1}
    found = {f"layers.{LAYER}.{leaf}": number for leaf, number in axes.items()}
    return next((name, number) for name, number in found.items() if name in model.points)


# The blocks. What they return is compared without a batch's axis.


def read_everything(model: Any) -> Values:
    names = list(model.points())
    with opened(model, PROMPT):
        read: Values = save({})
        for name in names:
            value = model.points[name]
            read[name] = value[..., -1, :].clone() if name == "logits" else value.clone()
    return read


def read_by_attribute(model: Any) -> Values:
    layer, names = model.layers[LAYER], set(model.points())
    is_bloom = not isinstance(model, VLLM) and model.config.model_type == "bloom"
    with opened(model, PROMPT):
        read: Values = save({})
        if "embed.output" in names:
            read["embed"] = model.embed.output
            read["input"] = layer.input
        if f"layers.{LAYER}.attn.heads" in names and f"layers.{LAYER}.mlp.input" in names:
            read["attn.input"] = layer.attn.input  # parts are modules of their own
        for leaf in ("attn.q", "attn.k", "attn.v", "attn.latent", "attn.heads", "mlp.input", "mlp.up"):
            if f"layers.{LAYER}.{leaf}" in names:
                read[leaf] = operator.attrgetter(leaf)(layer)
        if f"layers.{LAYER}.mlp.output" in names:
            # In transformers, Falcon adds to it in place, and Bloom's MLP returns its sum with the stream.
            name = f"layers.{LAYER}.mlp.output"
            value = model.points[name] if is_bloom else whole(layer.mlp.output)
            read["mlp.output"] = value.clone()
        for index in range(LAYER + 1, len(model.layers)):
            read[f"output of {index}"] = after(model, index)
        read["len"] = torch.tensor([float(len(model.layers))])
    return read


def edit_in_place(model: Any) -> Values:
    after = {}
    for name in writable(model):
        with opened(model, PROMPT):
            model.points[name][..., 0] += 3.0
            logits = model.points["logits"][..., -1, :].clone().save()
        after[name] = logits
    return after


def assign(model: Any) -> Values:
    after = {}
    for name in writable(model):
        with opened(model, PROMPT):
            model.points[name] = model.points[name] * 1.5 + 0.1
            logits = model.points["logits"][..., -1, :].clone().save()
        after[name] = logits
    return after


def ablate_a_head(model: Any) -> Values:
    name, num_axes = mixing(model)
    with opened(model, PROMPT):
        if num_axes > 1:
            model.layers[LAYER].attn.heads[..., 2, :] = 0
        else:
            model.points[name][..., 2:34] = 0
        last = after(model, len(model.layers) - 1).clone().save()
        logits = model.points["logits"][..., -1, :].save()
    return {"after": last, "logits": logits}


def patch_from_another_prompt(model: Any) -> Values:
    with opened(model, OTHER):
        hidden = after(model, LAYER)[..., -1, :].save()
    with opened(model, PROMPT):
        after(model, LAYER)[..., -1, :] = hidden
        logits = model.points["logits"][..., -1, :].save()
    return {"hidden": hidden, "logits": logits}


def patch_between_invokes(model: Any) -> Values:
    name, num_axes = mixing(model)
    last = (..., -1, *[1] * (num_axes - 1), slice(None))
    with opened(model, None) as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke(given(model, OTHER)):
            hidden = model.points[name][last].clone()
            barrier()
        with tracer.invoke(given(model, PROMPT)):
            barrier()
            model.points[name][last] = hidden
            logits = model.points["logits"][..., -1, :].save()
    with opened(model, None) as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke(given(model, OTHER)):
            stream = after(model, LAYER)[..., -1, :].clone()
            barrier()
        with tracer.invoke(given(model, PROMPT)):
            output = after(model, LAYER)
            barrier()
            output[..., -1, :] = stream
            patched = model.points["logits"][..., -1, :].save()
    return {"heads": logits, "stream": patched}


def steer_while_generating(model: Any) -> Values:
    shapes = model.points()
    later = f"layers.{LAYER + 1}.output"
    later = later if later in shapes else f"layers.{LAYER + 1}.mlp.output"
    direction = torch.linspace(-3.0, 3.0, shapes[later][0])
    with opened(model, PROMPT, NUM_TOKENS) as tracer:
        steps: list[torch.Tensor] = save([])
        for _ in tracer.iter[:]:
            stream = after(model, LAYER)
            stream[..., -1, :] += direction
            model.points[later] = model.points[later] * 1.1
            steps.append(model.points["logits"][..., -1, :].clone())
    return {
        "number": torch.tensor([float(len(steps))]),
        **{f"step {n}": step for n, step in enumerate(steps)},
    }


def force_experts(model: Any) -> Values:
    name = f"layers.{LAYER}.moe.experts"
    if name not in model.points:
        return {}
    try:
        return _forced(model, name)
    except ValueError as error:
        if not any(reason in str(error) for reason in _UNKNOWN_WEIGHTS):
            raise
        return {REFUSED: torch.ones(1)}


def _forced(model: Any, name: str) -> Values:
    num_chosen = model.points()[name][0]
    with opened(model, PROMPT):
        model.points[name][..., -2:, :] = torch.tensor([3, 0][:num_chosen])
        edited = model.points[f"layers.{LAYER}.moe.weights"].clone().save()
        logits = model.points["logits"][..., -1, :].clone().save()
    with opened(model, PROMPT):
        model.points[name] = 3 - model.points[name]
        assigned = model.points[f"layers.{LAYER}.moe.weights"].clone().save()
        after = model.points["logits"][..., -1, :].clone().save()
    return {"edited": edited, "logits": logits, "assigned": assigned, "after": after}


def patterns_while_generating(model: Any) -> Values:
    names = [name for name in points_of_a_layer(model.points()) if name.endswith("attn.pattern")]
    if not names:
        return {}
    with opened(model, PROMPT, NUM_TOKENS) as tracer:
        steps: list[torch.Tensor] = save([])
        for _ in tracer.iter[:]:
            steps += [model.points[name].clone() for name in names]
    return {f"step {n}": step for n, step in enumerate(steps)}


def states_while_generating(model: Any) -> Values:
    names = [name for name in points_of_a_layer(model.points()) if name.endswith("mixer.state")]
    if not names:
        return {}
    with opened(model, None, NUM_TOKENS) as tracer:
        steps: list[torch.Tensor] = save([])
        others: list[torch.Tensor] = save([])
        with tracer.invoke(given(model, PROMPT)):
            for _ in tracer.iter[:]:
                steps += [model.points[name] for name in names]
        with tracer.invoke(given(model, OTHER)):
            for _ in tracer.iter[:]:
                others += [model.points[name] for name in names]
    return {
        f"invoke {i}, step {n}": step
        for i, of_invoke in enumerate((steps, others))
        for n, step in enumerate(of_invoke)
    }


def skip_a_layer(model: Any) -> Values:
    # Layers of these return a tuple in transformers.
    is_tuple = not isinstance(model, VLLM) and model.config.model_type in {"bloom", "falcon", "falcon_h1"}
    with opened(model, PROMPT):
        layer = model.layers[LAYER]
        value = layer.input * 1.25
        layer.skip((value,) if is_tuple else value)
        after = model.layers[LAYER + 1].input.clone().save()
        logits = model.points["logits"][..., -1, :].save()
    return {"after": after, "logits": logits}


def look_through_a_lens(model: Any) -> Values:
    # OPT-350m has no final norm, and a projection in its place.
    final = model.norm if "norm.output" in model.points else model.model.decoder.project_out
    with opened(model, PROMPT):
        head = model.lm_head if hasattr(model, "lm_head") else model.embed_out
        lens: Values = save({})
        for index in range(len(model.layers)):
            hidden = final(after(model, index)[..., -1, :])
            # What vLLM's linears return is a tuple, with a bias that the caller may add.
            lens[f"layer {index}"] = head(hidden[0] if isinstance(hidden, tuple) else hidden)
    return lens


BLOCKS: Final[dict[str, Callable[[Any], Values]]] = {
    block.__name__: block
    for block in (
        read_everything,
        read_by_attribute,
        edit_in_place,
        assign,
        ablate_a_head,
        patch_from_another_prompt,
        patch_between_invokes,
        steer_while_generating,
        force_experts,
        patterns_while_generating,
        states_while_generating,
        skip_a_layer,
        look_through_a_lens,
    )
}


BESIDE_CERTIFICATE: Final = BLOCKS.keys() - {
    block.__name__ for block in (read_everything, edit_in_place, assign, skip_a_layer)
}
"""The blocks that do what a certificate does not compare."""


def expected_values(checkpoint: Path, names: Iterable[str] = BLOCKS) -> dict[str, Values | str]:
    """Return what ``LanguageModel`` gives, or how it failed."""
    model = LanguageModel(str(checkpoint), dtype=torch.float32, attn_implementation="eager", dispatch=True)
    return {name: tried(BLOCKS[name], model) for name in names}


def compared(model: VLLM, wanted: dict[str, Values | str], tolerance: float = 0.0) -> dict[str, str | None]:
    """Run the blocks on vLLM, and compare with what ``expected_values`` returned; returns what went wrong."""
    return {name: difference(value, tried(BLOCKS[name], model), tolerance) for name, value in wanted.items()}


def tried(block: Callable[[Any], Values], model: Any) -> Values | str:
    try:
        return block(model)
    except Exception:  # noqa: BLE001 - whatever it is, the report says it and the next block runs
        return traceback.format_exc()


def difference(wanted: Values | str, got: Values | str, tolerance: float = 0.0) -> str | None:
    if isinstance(wanted, str) or isinstance(got, str):
        sides = {"LanguageModel": wanted, "VLLM": got}
        return "\n".join(f"{side}: {failure}" for side, failure in sides.items() if isinstance(failure, str))
    if wanted.keys() != got.keys():
        return f"different values: {sorted(wanted.keys() ^ got.keys())}"
    found = [f"{name}: {how}" for name in wanted if (how := _apart(wanted[name], got[name], tolerance))]
    return "\n".join(found) or None


def _apart(wanted: torch.Tensor, got: torch.Tensor, tolerance: float) -> str:
    # One form has an axis for the batch of one, the other has not; of logits each has one.
    wanted, got = (value[0] if value.shape[0] == 1 else value for value in (wanted, got))
    if wanted.shape != got.shape:
        return f"of shape {tuple(wanted.shape)} and {tuple(got.shape)}"
    difference = float((wanted - got).abs().max() / wanted.abs().max().clamp_min(1e-6))
    return "" if difference < _RELATIVE + tolerance else f"apart by {difference:.2g} of the largest"
