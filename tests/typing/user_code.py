"""What people write, as a type checker sees it; checked by `make lint` and never run."""

from __future__ import annotations

import torch

import nnsight_engine
from nnsight_engine import CONFIG, Envoy, LanguageModel, NNsight, eproperty, save
from nnsight_engine.envoys.eproperty import requires_output


class BlockEnvoy(Envoy):
    """A property of one's own."""

    @eproperty(key="output", description="the residual stream")
    @requires_output
    def hidden(self) -> None:
        """The block's output."""

    @hidden.preprocess
    def _first(self, value: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return value[0]


def values(model: NNsight) -> torch.Tensor:
    """Read, edit, loop."""
    with model.trace("x") as tracer:
        h = model.layers[0].output.save()
        model.layers[1].mlp.output[:, -1] = 0
        model.layers[2].output = h * 2
        for step in tracer.iter[1:4]:
            model.lm_head.output[step] = 0
        cache = tracer.cache([model.layers[3]])
        result = tracer.result.save()
    shape: torch.Size = save(h.shape)
    return torch.as_tensor(cache["model.layers.3"].output + result).view(shape)


def invokes(model: LanguageModel) -> list[object]:
    """Invokes, generation, sessions, edits, scans."""
    with model.generate(max_new_tokens=3) as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke("a"):
            clean = model.transformer.h[0].output[0]
            barrier()
        with tracer.invoke("b"):
            barrier()
            model.transformer.h[0].output[0][:] = clean
            tracer.stop()
    with model.session():
        with model.trace("x"):
            first = model.lm_head.output
        with model.trace("y"):
            model.lm_head.output = first
    with model.edit() as edited:
        edited.transformer.h[1].output[0][:] = 0
    with model.scan("x"):
        width: int = save(model.transformer.h[0].output[0].shape[-1])
    attentions = model.modules(lambda envoy: "attn" in str(envoy.path))
    return [width, *(block.path for block in model.transformer.h), *attentions]


CONFIG.APP.PYMOUNT = False
model = NNsight(
    torch.nn.Sequential(torch.nn.Linear(2, 2)), rename={"0": "first"}, envoys={torch.nn.Linear: BlockEnvoy}
)
hidden: object = nnsight_engine.save(model.first.hidden)
first: Envoy = model[0]
some: list[Envoy] = model[:1]
unknown: object = nnsight_engine.NNsite  # type: ignore[attr-defined]
