"""The bundled language model: generation, and the two patching methods of the NNsight paper's Table 1."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from transformers import LogitsProcessor

from benchmarks.precision import DTYPE
from benchmarks.tracing.timing import CallsByTurns, Case, Measure, Sampler, Step, StepsByTurns, ratio
from nnsight_engine import LanguageModel, bundled_model_path, save

_TOKENS: Final = 64
_BATCH: Final = 32
_LENGTH: Final = 12
_LOWEST_TOKEN: Final = 100
"""Ids below it are special tokens."""
_TARGET: Final = 1.03
_LAYER: Final = 15
_POSITION: Final = -1
"""The token whose activations are patched, as both methods do."""


def language_cases() -> list[Case]:
    """Return every case on this model, which is loaded once, by the first."""
    loaded: list[LanguageModel] = []

    def model() -> LanguageModel:
        if not loaded:
            loaded.append(_load())
        return loaded[0]

    middle = slice(_LAYER, _LAYER + 1)
    every = slice(None)
    size = f"batch {_BATCH}, {_LENGTH} tokens"
    measures = (ratio("ours", "hooks", _TARGET),)
    generation: tuple[Measure, ...] = (ratio("ours", "bare", _TARGET), ratio("ours", "hooks"))
    return [
        Case(
            "one layer's output saved at each token of generate",
            f"{_TOKENS} tokens",
            lambda: _generation(model()),
            generation,
        ),
        Case("activation patching, one MLP layer", size, lambda: _patching(model(), middle), measures),
        Case("activation patching, all MLP layers", size, lambda: _patching(model(), every), measures),
        Case("attribution patching, all MLP layers", size, lambda: _attribution(model()), measures),
    ]


def _load() -> LanguageModel:
    model = LanguageModel(str(bundled_model_path()), dtype=DTYPE, dispatch=True)
    model._module.requires_grad_(requires_grad=False)  # noqa: SLF001 - what both sides run
    return model


def _ids(seed: int, num_rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(_LOWEST_TOKEN, 40_000, (num_rows, _LENGTH), generator=generator)


def _check(ours: list[torch.Tensor], hooks: list[torch.Tensor]) -> None:
    if not all(torch.equal(first, second) for first, second in zip(ours, hooks, strict=True)):
        raise AssertionError("the trace and the hooks must compute the same, and do not")


@contextlib.contextmanager
def _hooked(modules: list[Any], hook: Callable[[int, torch.Tensor], torch.Tensor | None]) -> Iterator[None]:
    """Call ``hook`` with each module's number and output."""

    def numbered(number: int) -> Callable[..., torch.Tensor | None]:
        return lambda _module, _args, output: hook(number, output)

    handles = [module.register_forward_hook(numbered(number)) for number, module in enumerate(modules)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _twin(model: LanguageModel) -> Any:
    """Return another module on the very same weights, for a side that runs at the same time."""
    module = model._module  # noqa: SLF001 - what both sides run
    return copy.deepcopy(module, {id(weight): weight for weight in module.parameters()})


class _AtEachToken(LogitsProcessor):  # type: ignore[misc] # transformers is untyped here
    """Calls a step wherever a token is chosen."""

    def __init__(self, step: Step) -> None:
        """Keep the step."""
        self.step = step

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:  # noqa: ARG002 - its signature
        """Change nothing."""
        self.step()
        return scores


def _generation(model: LanguageModel) -> Sampler:
    ids = _ids(0, 1)
    plain, hooked = _twin(model), _twin(model)

    def options(step: Step) -> dict[str, Any]:
        return {
            "max_new_tokens": _TOKENS,
            "min_new_tokens": _TOKENS,
            "do_sample": False,
            "attention_mask": torch.ones_like(ids),
            "pad_token_id": 0,
            "logits_processor": [_AtEachToken(step)],
        }

    def bare(step: Step) -> None:
        plain.generate(ids, **options(step))

    def hooks(step: Step) -> list[torch.Tensor]:
        kept: list[torch.Tensor] = []
        with _hooked([hooked.model.layers[_LAYER]], lambda _, output: kept.append(output)):
            hooked.generate(ids, **options(step))
        return kept

    def ours(step: Step) -> list[torch.Tensor]:
        with model.generate(ids, **options(step)) as tracer:
            kept = save([])
            for _ in tracer.iter[:]:
                kept.append(model.model.layers[_LAYER].output)
        return kept

    kept = ours(_nothing)
    if len(kept) != _TOKENS:
        raise AssertionError(f"{_TOKENS} tokens must give as many values, got {len(kept)}")
    _check(kept, hooks(_nothing))
    return StepsByTurns({"ours": ours, "hooks": hooks, "bare": bare}, _TOKENS)


def _nothing() -> None:
    """Do not wait."""


def _patching(model: LanguageModel, which: slice) -> Sampler:
    """Run one batch, and put its MLP outputs at one position into the run of another."""
    module: Any = model._module  # noqa: SLF001 - what both sides run
    clean, corrupted = _ids(1, _BATCH), _ids(2, _BATCH)
    modules = [layer.mlp for layer in module.model.layers[which]]
    envoys = [layer.mlp for layer in model.model.layers[which]]

    def hooks() -> list[torch.Tensor]:
        kept: list[torch.Tensor] = []

        def patch(number: int, output: torch.Tensor) -> torch.Tensor:
            output[:, _POSITION] = kept[number]
            return output

        with torch.no_grad():
            with _hooked(modules, lambda _, output: kept.append(output[:, _POSITION])):
                module(clean)
            with _hooked(modules, patch):
                logits = module(corrupted).logits
        return [logits[:, _POSITION]]

    def ours() -> list[torch.Tensor]:
        with torch.no_grad():
            with model.trace(clean):
                kept = save([mlp.output[:, _POSITION] for mlp in envoys])
            with model.trace(corrupted):
                for mlp, value in zip(envoys, kept, strict=True):
                    mlp.output[:, _POSITION] = value
                logits = model.output.logits.save()
        return [logits[:, _POSITION]]

    _check(ours(), hooks())
    return CallsByTurns({"ours": ours, "hooks": hooks})


def _metric(logits: torch.Tensor) -> torch.Tensor:
    return (logits[:, _POSITION, 1000] - logits[:, _POSITION, 2000]).float().sum()


def _attribution(model: LanguageModel) -> Sampler:
    """Estimate what patching each MLP would do: the difference of the runs times the gradient."""
    module: Any = model._module  # noqa: SLF001 - what both sides run
    clean, corrupted = _ids(1, _BATCH), _ids(2, _BATCH)
    layers = module.model.layers

    def hooks() -> list[torch.Tensor]:
        kept: list[torch.Tensor] = []
        attributions: list[torch.Tensor] = []

        def attribute(number: int, output: torch.Tensor) -> None:
            output.register_hook(
                lambda gradient: attributions.append(((kept[number] - output) * gradient).sum(-1))
            )

        modules = [layer.mlp for layer in layers]
        with torch.no_grad(), _hooked(modules, lambda _, output: kept.append(output)):
            module(clean)
        with (
            _hooked([module.model.embed_tokens], lambda _, output: output.requires_grad_()),
            _hooked(modules, attribute),
        ):
            logits = module(corrupted).logits
        _metric(logits).backward()
        return attributions

    def ours() -> list[torch.Tensor]:
        with torch.no_grad(), model.trace(clean):
            kept = save([layer.mlp.output for layer in model.model.layers])
        with model.trace(corrupted):
            model.model.embed_tokens.output.requires_grad_()
            outputs = [layer.mlp.output for layer in model.model.layers]
            metric = _metric(model.output.logits)
            attributions = save([])
            with metric.backward():
                for output, value in zip(reversed(outputs), reversed(kept), strict=True):
                    attributions.append(((value - output) * output.grad).sum(-1))
        return attributions

    _check(ours(), hooks())
    return CallsByTurns({"ours": ours, "hooks": hooks})
