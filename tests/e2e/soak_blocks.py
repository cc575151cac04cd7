"""Blocks for the soak: each a trace of its own kind, over a prompt of token ids, submitted and not yet run.

What a block draws at random it draws from a generator of its own, so that the same block gives the same
values each time. ``over_chunks`` says what the documentation says of prompts that come in chunks: whether the
block asks for one place of the prompt only, or for none, so that it has the answer all the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Final, cast

import torch

from nnsight_engine import save
from nnsight_engine.vllm_backend.request_tracer import SentTrace
from nnsight_engine.vllm_backend.vllm import VLLM
from tests.e2e.traces import HeldTracer

GREEDY: Final[dict[str, Any]] = {"temperature": 0.0, "ignore_eos": True, "logprobs": 2}
WIDTH: Final = 128
NUM_TOKENS: Final = 6

Make = Callable[[VLLM, list[int], int], HeldTracer]


@dataclasses.dataclass(frozen=True)
class Maker:
    """How to submit one kind of block.

    Attributes:
        make: Opens the trace; the number varies layers and values.
        over_chunks: Whether it has its answer of a prompt in chunks.
        fits_all: Whether it may be given a prompt of any length.
    """

    make: Make
    over_chunks: bool
    fits_all: bool = True

    def sent(self, model: VLLM, prompt: list[int], number: int) -> SentTrace:
        """Return the trace as requests."""
        sent: SentTrace = self.make(model, prompt, number).sent
        return sent


def opened(model: VLLM, *prompt: list[int], tokens: int = NUM_TOKENS, **sampling: Any) -> HeldTracer:
    options = {**GREEDY, **sampling}
    return cast("HeldTracer", model.trace(*prompt, max_tokens=tokens, tracer_cls=HeldTracer, **options))


def drawn(number: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(number))


def one_layer(model: VLLM, prompt: list[int], number: int) -> Any:
    with opened(model, prompt, tokens=1) as tracer:
        hidden = model.layers[number % 4].output.save()  # noqa: F841 - fetched by name, as all that follow
    return tracer


def every_step(model: VLLM, prompt: list[int], number: int) -> Any:
    with opened(model, prompt) as tracer:
        rows, tokens = save([]), save([])
        for _ in tracer.iter[:]:
            rows.append(model.layers[number % 4].output)
            tokens.append(model.samples.output.item())
    return tracer


def several_layers(model: VLLM, prompt: list[int], number: int) -> Any:
    with opened(model, prompt, tokens=2 + number % 4) as tracer:
        rows: dict[str, Any] = save({})
        for step in tracer.iter[:]:
            for index, layer in enumerate(model.layers):
                rows[f"{step}.{index}"] = layer.output[-1].clone()
    return tracer


def scaled(model: VLLM, prompt: list[int], number: int) -> Any:
    with opened(model, prompt) as tracer:
        tokens = save([])
        for _ in tracer.iter[:]:
            model.layers[1].output[:] *= 1.0 + 0.1 * (number % 5)
            last = model.layers[3].output.save()  # noqa: F841
            tokens.append(model.samples.output.item())
    return tracer


def added(model: VLLM, prompt: list[int], number: int) -> Any:
    direction = drawn(number, WIDTH)
    with opened(model, prompt) as tracer:
        rows = save([])
        for _ in tracer.iter[:]:
            model.model.layers[number % 3].mlp.output[:] += direction
            rows.append(model.layers[3].output)
    return tracer


def noisy(model: VLLM, prompt: list[int], number: int) -> Any:
    with opened(model, prompt) as tracer:
        source = torch.Generator().manual_seed(number)
        rows = save([])
        for _ in tracer.iter[:]:
            output = model.model.layers[1].mlp.output
            model.model.layers[1].mlp.output = output + torch.randn(output.shape, generator=source)
            rows.append(model.layers[2].output)
    return tracer


def assigned(model: VLLM, prompt: list[int], number: int) -> Any:
    value = drawn(number, len(prompt), WIDTH)
    with opened(model, prompt) as tracer:
        logits = save([])
        model.model.layers[number % 4].mlp.output = value
        for _ in tracer.iter[:]:
            logits.append(model.logits.output)
    return tracer


def stream_assigned(model: VLLM, prompt: list[int], number: int) -> Any:
    value = drawn(number, len(prompt), WIDTH)
    with opened(model, prompt) as tracer:
        model.layers[number % 3].output = value
        for _ in tracer.iter[1:]:
            last = model.layers[3].output.save()  # noqa: F841
    return tracer


def later_steps(model: VLLM, prompt: list[int], number: int) -> Any:
    with opened(model, prompt) as tracer:
        rows = save([])
        for step in tracer.iter[1 : 3 + number % 3]:
            rows.append((step, model.layers[2].mlp.output, model.layers[3].input))
    return tracer


def logits_edited(model: VLLM, prompt: list[int], number: int) -> Any:
    with opened(model, prompt) as tracer:
        tokens = save([])
        for _ in tracer.iter[:]:
            model.logits.output[:, number % 50] += 30.0
            tokens.append(model.samples.output.item())
    return tracer


def samples_replaced(model: VLLM, prompt: list[int], number: int) -> Any:
    with opened(model, prompt) as tracer:
        for step in tracer.iter[:]:
            if step % 2:
                model.samples.output = torch.tensor([[number % 50 + 1]])
        answer = tracer.result.save()  # noqa: F841
    return tracer


def projections(model: VLLM, prompt: list[int], number: int) -> Any:
    with opened(model, prompt) as tracer:
        rows = save([])
        for _ in tracer.iter[:]:
            attention = model.layers[number % 4].attn
            rows.append((attention.q, attention.k, attention.v))
    return tracer


def heads_ablated(model: VLLM, prompt: list[int], number: int) -> Any:
    with opened(model, prompt) as tracer:
        after = save([])
        for _ in tracer.iter[:]:
            model.layers[1].attn.heads[:, number % 4] = 0
            model.layers[2].attn.q[:] *= 0.5
            after.append(model.layers[2].attn.heads)
    return tracer


def patterns(model: VLLM, prompt: list[int], number: int) -> Any:
    with opened(model, prompt) as tracer:
        seen = save([])
        for _ in tracer.iter[:]:
            seen.append(model.layers[number % 4].attn.pattern)
    return tracer


def skipped(model: VLLM, prompt: list[int], number: int) -> Any:
    with opened(model, prompt) as tracer:
        rows = save([])
        for _ in tracer.iter[:]:
            value = model.layers[1].mlp.input * 0.5
            model.layers[1 + number % 2].mlp.skip(value)
            rows.append(model.layers[3].output)
    return tracer


def stopped(model: VLLM, prompt: list[int], number: int) -> Any:
    with opened(model, prompt, tokens=30) as tracer:
        seen = save([])
        for step in tracer.iter[:]:
            seen.append(model.samples.output.item())
            if step == 1 + number % 3:
                tracer.stop()
    return tracer


def raising(model: VLLM, prompt: list[int], number: int) -> Any:
    with opened(model, prompt, tokens=30) as tracer:
        seen = save([])
        for step in tracer.iter[:]:
            seen.append(model.layers[1].output)
            if step == number % 3:
                raise KeyError(f"mine {number}")
    return tracer


def wrong_shape(model: VLLM, prompt: list[int], number: int) -> Any:
    with opened(model, prompt) as tracer:
        for _ in tracer.iter[1 + number % 2 :]:
            model.model.layers[1].mlp.output = torch.zeros(3, 5)
    return tracer


def patched(model: VLLM, prompt: list[int], number: int) -> Any:
    # The second prompt is another one. Its request never runs before the first's, which it waits for.
    with opened(model) as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke(prompt):
            hidden = model.layers[number % 3].output[-1]
            barrier()
        with tracer.invoke(prompt[::-1]):
            barrier()
            model.layers[3].output[-1] = hidden
            logits = model.logits.output.save()  # noqa: F841
    return tracer


def several_choices(model: VLLM, prompt: list[int], number: int) -> Any:
    with opened(model, prompt, n=2, temperature=1.0, top_k=1) as tracer:
        rows, tokens = save([]), save([])
        for _ in tracer.iter[:]:
            rows.append(model.layers[number % 4].output)
            tokens.append(model.samples.output.item())
    return tracer


def inside_a_forward(model: VLLM, prompt: list[int], number: int) -> Any:
    with opened(model, prompt) as tracer:
        down = save([])
        for _ in tracer.iter[:]:
            down.append(model.model.layers[number % 4].mlp.source.self_down_proj_0.input)
    return tracer


def lens(model: VLLM, prompt: list[int], number: int) -> Any:
    with opened(model, prompt, tokens=3) as tracer:
        seen = save([])
        for _ in tracer.iter[:]:
            seen.append(model.lm_head(model.norm(model.layers[number % 4].output[-1:])))
    return tracer


MAKERS: Final[dict[str, Maker]] = {
    "one_layer": Maker(one_layer, over_chunks=True),
    "every_step": Maker(every_step, over_chunks=True),
    "several_layers": Maker(several_layers, over_chunks=False),
    "scaled": Maker(scaled, over_chunks=False),
    "added": Maker(added, over_chunks=False),
    "noisy": Maker(noisy, over_chunks=False),
    "assigned": Maker(assigned, over_chunks=True),
    "stream_assigned": Maker(stream_assigned, over_chunks=True),
    "later_steps": Maker(later_steps, over_chunks=True),
    "logits_edited": Maker(logits_edited, over_chunks=True),
    "samples_replaced": Maker(samples_replaced, over_chunks=True),
    "projections": Maker(projections, over_chunks=True),
    "heads_ablated": Maker(heads_ablated, over_chunks=False),
    "patterns": Maker(patterns, over_chunks=True),
    "skipped": Maker(skipped, over_chunks=False),
    "stopped": Maker(stopped, over_chunks=True),
    "raising": Maker(raising, over_chunks=True),
    "wrong_shape": Maker(wrong_shape, over_chunks=True),
    "patched": Maker(patched, over_chunks=False, fits_all=False),
    "several_choices": Maker(several_choices, over_chunks=True),
    "inside_a_forward": Maker(inside_a_forward, over_chunks=True),
    "lens": Maker(lens, over_chunks=True),
}
"""Every kind, by name."""
