"""The tasks with tracing blocks, which read the same for ``nnsight`` and for us: the library is an argument.

That each value is waited for on its own is what is measured, so a loop stays a loop.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoTokenizer

from benchmarks.peers.hooks import generation_options
from benchmarks.peers.tasks import LANGUAGE, NUM_TOKENS, SMALL, Models, Size, Subject


class TraceWork:
    """The tasks on one model, as ``nnsight_engine`` or ``nnsight`` wraps it."""

    def __init__(self, library: Any, model: Any, subject: Subject) -> None:
        """Keep the model."""
        self._save = library.save
        self.model = model
        self._subject = subject
        layers = subject.layers_of(model)
        self._layers = [layers[index] for index in range(subject.num_layers)]
        self._layer = self._layers[subject.layer]

    def one_value(self) -> list[torch.Tensor]:
        """Save what one layer returns."""
        model, layer, inputs = self.model, self._layer, self._subject.inputs
        with torch.no_grad(), model.trace(inputs):
            hidden = layer.output.save()
        return [hidden]

    def all_values(self) -> list[torch.Tensor]:
        """Save what every layer returns."""
        model, layers, inputs, save = self.model, self._layers, self._subject.inputs, self._save
        with torch.no_grad(), model.trace(inputs):
            kept: list[torch.Tensor] = save([])
            for layer in layers:
                kept.append(layer.output)  # noqa: PERF401 - a statement of its own
        return kept

    def one_write(self) -> list[torch.Tensor]:
        """Add a vector to what one layer returns."""
        model, layer, subject = self.model, self._layer, self._subject
        with torch.no_grad(), model.trace(subject.inputs):
            layer.output = layer.output + subject.vector
            result = subject.result_of(model.output).save()  # type: ignore[attr-defined] # both give tensors one
        return [result]

    def shared_invokes(self) -> list[torch.Tensor]:
        """Save what each layer returns in an invoke of its own, of which the first has the input."""
        model, layers, inputs, save = self.model, self._layers, self._subject.inputs, self._save
        with torch.no_grad(), model.trace() as tracer:
            kept: list[torch.Tensor] = save([])
            with tracer.invoke(inputs):
                kept.append(layers[0].output)
            for layer in layers[1:]:
                with tracer.invoke():
                    kept.append(layer.output)
        return kept

    def batched_invokes(self) -> list[torch.Tensor]:
        """Save what one layer returns in invokes with a prompt each."""
        model, layer, prompts, save = self.model, self._layer, self._subject.prompts, self._save
        with torch.no_grad(), model.trace() as tracer:
            kept: list[torch.Tensor] = save([])
            for prompt in prompts:
                with tracer.invoke(prompt):
                    kept.append(layer.output)
        return kept

    def generation(self) -> list[torch.Tensor]:
        """Generate greedily and save what one layer returns at each step."""
        model, layer, inputs, save = self.model, self._layer, self._subject.inputs, self._save
        with model.generate(inputs, **generation_options()) as tracer:
            kept: list[torch.Tensor] = save([])
            for _ in tracer.iter[:NUM_TOKENS]:
                kept.append(layer.output)  # noqa: PERF401 - as above
        return [torch.cat(kept, 1)]

    def gradient(self) -> list[torch.Tensor]:
        """Save the gradient of the result's sum by what one layer returns."""
        model, layer, subject = self.model, self._layer, self._subject
        with model.trace(subject.inputs):
            hidden = layer.output
            hidden.requires_grad_()
            total = subject.result_of(model.output).sum()
            with total.backward():
                gradient = hidden.grad.save()
        return [gradient]


def works(library: Any, models: Models) -> dict[Size, TraceWork]:
    """Return the tasks on each model as the library wraps it."""
    tokenizer = AutoTokenizer.from_pretrained(models.path)
    small, language = models.subjects[SMALL], models.subjects[LANGUAGE]
    wrapped = library.LanguageModel(language.module, tokenizer=tokenizer)
    return {
        SMALL: TraceWork(library, library.NNsight(small.module), small),
        LANGUAGE: TraceWork(library, wrapped, language),
    }
