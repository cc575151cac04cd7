"""The tasks with tracing blocks, which read the same for ``nnsight`` and for us: the library is an argument.

The measured work includes waiting for each value on its own, so a loop stays a loop.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from benchmarks.peers.tasks import LANGUAGE, NUM_TOKENS, SMALL, Size, Subject, Works, generation_options


def trace_works(library: Any, model: Any, subject: Subject) -> Works:
    """Return the tasks on one model, as ``nnsight_engine`` or ``nnsight`` wraps it."""
    layers = [subject.layers_of(model)[index] for index in range(subject.num_layers)]
    return {**_trace_works(library, model, subject, layers), **_invoke_works(library, model, subject, layers)}


def _trace_works(library: Any, model: Any, subject: Subject, layers: list[Any]) -> Works:
    save, inputs, vector, layer = library.save, subject.inputs, subject.vector, layers[subject.layer]

    def one_value() -> list[torch.Tensor]:
        with torch.no_grad(), model.trace(inputs):
            hidden = layer.output.save()
        return [hidden]

    def all_values() -> list[torch.Tensor]:
        with torch.no_grad(), model.trace(inputs):
            kept: list[torch.Tensor] = save([])
            for one in layers:
                kept.append(one.output)  # noqa: PERF401 - a statement of its own
        return kept

    def one_write() -> list[torch.Tensor]:
        with torch.no_grad(), model.trace(inputs):
            layer.output = layer.output + vector
            result = subject.result_of(model.output).save()  # type: ignore[attr-defined] # both give tensors one
        return [result]

    def gradient() -> list[torch.Tensor]:
        with model.trace(inputs):
            hidden = layer.output
            hidden.requires_grad_()
            total = subject.result_of(model.output).sum()
            with total.backward():
                found = hidden.grad.save()
        return [found]

    return {work.__name__: work for work in (one_value, all_values, one_write, gradient)}


def _invoke_works(library: Any, model: Any, subject: Subject, layers: list[Any]) -> Works:
    save, inputs, layer = library.save, subject.inputs, layers[subject.layer]

    def shared_invokes() -> list[torch.Tensor]:
        with torch.no_grad(), model.trace() as tracer:
            kept: list[torch.Tensor] = save([])
            with tracer.invoke(inputs):
                kept.append(layers[0].output)
            for one in layers[1:]:
                with tracer.invoke():
                    kept.append(one.output)
        return kept

    def batched_invokes() -> list[torch.Tensor]:
        with torch.no_grad(), model.trace() as tracer:
            kept: list[torch.Tensor] = save([])
            for prompt in subject.prompts:
                with tracer.invoke(prompt):
                    kept.append(layer.output)
        return kept

    def generation() -> list[torch.Tensor]:
        with model.generate(inputs, **generation_options()) as tracer:
            kept: list[torch.Tensor] = save([])
            for _ in tracer.iter[:NUM_TOKENS]:
                kept.append(layer.output)  # noqa: PERF401 - as above
        return [torch.cat(kept, 1)]

    return {work.__name__: work for work in (shared_invokes, batched_invokes, generation)}


def wrapped_language_model(library: Any, subject: Subject, path: Path) -> Any:
    """Return the language model in a folder as the library wraps it."""
    return library.LanguageModel(subject.module, tokenizer=AutoTokenizer.from_pretrained(path))


def local_works(library: Any, subjects: dict[Size, Subject], path: Path) -> dict[Size, Works]:
    """Return the tasks on each model."""
    small, language = subjects[SMALL], subjects[LANGUAGE]
    wrapped = wrapped_language_model(library, language, path)
    return {
        SMALL: trace_works(library, library.NNsight(small.module), small),
        LANGUAGE: trace_works(library, wrapped, language),
    }
