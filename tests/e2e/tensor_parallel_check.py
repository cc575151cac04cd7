"""One block, one rank or two: what it reads is the same, and what it writes does the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

from nnsight_engine import save
from nnsight_engine.core.trees import map_tensors, tensors
from nnsight_engine.vllm_backend.vllm import VLLM
from tests.e2e import point_blocks as both
from tests.e2e.point_blocks import OTHER, PROMPT, Values
from tests.families.checkpoints import write_checkpoint
from tests.families.moves import LAYER

_CHANGED: Final[dict[str, dict[str, Any]]] = {"llama": {"num_key_value_heads": 1}}
"""What is different in checkpoints' configs: both ranks have the keys of Llama's."""

LONG: Final = [*PROMPT, *OTHER, *PROMPT[::-1]]
"""A prompt that comes in chunks."""


def own_modules(model: VLLM) -> list[str]:
    """Return the paths of a layer's modules, and of those around the layers."""
    layers = f"{model.path}.{model.layers.points.family.layers}."
    paths = [str(envoy.path) for envoy in model.modules()]
    return [path for path in paths if not path.startswith(layers) or path.startswith(f"{layers}{LAYER}")]


def tried(act: Callable[[], Values]) -> Values:
    """Return what a block gives, or that it fails: on one rank as on two."""
    try:
        return act()
    except Exception:  # noqa: BLE001 - which one may differ: a module that is never called is not waited for
        return {"fails": torch.ones(1)}


def numbered(prefix: str, value: Any) -> Values:
    """Return a value's tensors by name; of a weight that vLLM has packed away, nothing is left."""
    found = {f"{prefix} {number}": tensor for number, tensor in enumerate(tensors(value))}
    return {name: tensor for name, tensor in found.items() if tensor.numel()}


def every_module(model: VLLM, act: Callable[[str], Values]) -> Values:
    """Do something with each module, in a trace of its own."""
    found: Values = {}
    for path in own_modules(model):
        found |= {f"{path}: {name}": value for name, value in tried(lambda path=path: act(path)).items()}  # type: ignore[misc] # the default binds it
    return found


# The blocks. Each gives tensors by name.


def read_modules(model: VLLM) -> Values:
    def read(path: str) -> Values:
        envoy = model.get(path)
        with both.opened(model, PROMPT):
            entered = save(envoy.inputs)
            left = save(envoy.output)
        return {**numbered("input", entered), **numbered("output", left)}

    return every_module(model, read)


def edit_what_modules_return(model: VLLM) -> Values:
    def edit(path: str) -> Values:
        envoy = model.get(path)
        with both.opened(model, PROMPT):
            for tensor in tensors(envoy.output):
                tensor[..., 0] *= 0.5
                tensor[..., -1] += 1
            logits = model.logits.output.clone().save()
        return {"logits": logits}

    return every_module(model, edit)


def edit_what_modules_take(model: VLLM) -> Values:
    def edit(path: str) -> Values:
        envoy = model.get(path)
        with both.opened(model, PROMPT):
            for tensor in tensors(envoy.inputs):
                if tensor.is_floating_point():
                    tensor[..., 0] *= 0.5
                    tensor[..., -1] += 1
            logits = model.logits.output.clone().save()
        return {"logits": logits}

    return every_module(model, edit)


def call_modules(model: VLLM) -> Values:
    def call(path: str) -> Values:
        envoy = model.get(path)
        with both.opened(model, PROMPT):
            args, kwargs = envoy.inputs
            result = save(envoy(*args, **kwargs))
            logits = model.logits.output.clone().save()
        return {**numbered("result", result), "logits": logits}

    return every_module(model, call)


def look_at_weights(model: VLLM) -> Values:
    def look(path: str) -> Values:
        envoy = model.get(path)
        with both.opened(model, PROMPT):
            found = save([envoy.weight.clone()])
            if getattr(envoy, "bias", None) is not None:
                found.append(envoy.bias.clone())
        return numbered("weight", found)

    return every_module(model, look)


def skip_projections(model: VLLM) -> Values:
    points = model.layers.points
    after = {}
    for leaf in ("attn.q", "mlp.up", "mlp.act"):
        envoy = points.raw(f"{points.family.layers}.{LAYER}.{points.layout.blocks[LAYER].leaves[leaf].path}")
        with both.opened(model, PROMPT):
            shown = save(map_tensors(envoy.output, torch.clone))
        put = map_tensors(shown, ramp_like)
        with both.opened(model, PROMPT):
            envoy.skip(put)
            logits = model.logits.output.clone().save()
        after[leaf] = logits
    return after


def ramp_like(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor of this one's shape in which every number is another."""
    return torch.linspace(-1.0, 1.0, value.numel()).view(value.shape)


def apply_modules_all_along(model: VLLM) -> Values:
    final = model.norm if "norm.output" in model.points else model.model.decoder.project_out
    width = model.points()["embed.output"][0]
    with both.opened(model, PROMPT) as tracer:
        head = model.lm_head if hasattr(model, "lm_head") else model.embed_out
        before = save(final(torch.linspace(-1.0, 1.0, width)[None]))
        lens = save(head(flat(before)))
        hidden = final(model.layers[LAYER].output)
        within = save(head(flat(hidden)))
        scored = save(model.compute_logits(flat(hidden)))
        tracer.result.request  # noqa: B018 - waits for the request's end
        behind = save(head(flat(before)) * 2)
    return {"before": flat(before), "lens": lens, "within": within, "scored": scored, "behind": behind}


def flat(value: Any) -> torch.Tensor:
    """Return the tensor of what a module returns, a tuple from some."""
    tensor: torch.Tensor = value[0] if isinstance(value, tuple) else value
    return tensor


def read_in_chunks(model: VLLM) -> Values:
    found: Values = {}
    for name in model.points():
        if name.startswith("layers.") and not name.startswith(f"layers.{LAYER}."):
            continue
        with both.opened(model, LONG):
            found[name] = model.points[name].clone().save()
    return found


def write_in_chunks(model: VLLM) -> Values:
    points = model.layers.points
    stream = f"layers.{LAYER}.output"
    value = ramp_like(torch.empty(len(LONG), *model.points()[stream]))
    with both.opened(model, LONG):
        model.points[stream] = value
        written = save(model.logits.output.clone())
    fused = points.raw(f"{points.family.layers}.{LAYER}.{points.layout.blocks[LAYER].leaves['attn.q'].path}")
    with both.opened(model, PROMPT):
        shown = save(map_tensors(fused.output, torch.clone))
    put = map_tensors(
        shown, lambda part: ramp_like(part.new_empty(*part.shape[:-2], len(LONG), part.shape[-1]))
    )
    with both.opened(model, LONG):
        fused.output = put
        spread = save(model.logits.output.clone())
    return {"stream": written, "spread": spread}


BLOCKS: Final[dict[str, Callable[[Any], Values]]] = both.BLOCKS | {
    block.__name__: block
    for block in (
        read_modules,
        edit_what_modules_return,
        edit_what_modules_take,
        call_modules,
        look_at_weights,
        skip_projections,
        apply_modules_all_along,
        read_in_chunks,
        write_in_chunks,
    )
}


def started(checkpoint: Path, num_ranks: int) -> VLLM:
    """Start an engine whose steps are so short that ``LONG`` comes in chunks."""
    return VLLM(
        str(checkpoint),
        dispatch=True,
        enforce_eager=True,
        dtype="float32",
        max_model_len=64,
        max_num_seqs=4,
        max_num_batched_tokens=2 * len(PROMPT),
        num_gpu_blocks_override=32,
        tensor_parallel_size=num_ranks,
    )


def check(case: str, folder: Path) -> dict[str, str | None]:
    """Run the blocks on one rank and on two; returns what went wrong with each."""
    checkpoint = write_checkpoint(case, folder / case, **_CHANGED.get(case, {}))
    found: list[dict[str, Values | str]] = []
    for num_ranks in (1, 2):
        model = started(checkpoint, num_ranks)
        found.append({name: both.tried(block, model) for name, block in BLOCKS.items()})
        model.shutdown()
    return {name: both.difference(found[0][name], found[1][name]) for name in BLOCKS}
