"""Causal tracing: where in the model does the fact pass, that the Eiffel Tower is in Paris?

The embeddings of the subject are drowned in noise, so that the model no longer knows what is talked
about. Then the state of the clean run is put back at one layer and one position at a time. Where that
alone brings the answer back, what is needed for it passes there.

    python examples/causal_tracing.py
    python examples/causal_tracing.py --every 1 --samples 8 --save trace.png

Prints a map of layers × positions: 0 is no better than noise, 1 is the clean run. Expect the token that
tells the subject from others (``iffel``) up to the middle layers, and the last token of the prompt in the
upper ones. Takes a quarter of a minute on a processor; ``--every 1`` three times that. ``--save`` draws
it (needs ``pip install 'nnsight-engine[viz]'``).

The method is that of "Locating and Editing Factual Associations in GPT" (Meng et al., 2022). The noise has
three times the standard deviation of this prompt's embeddings; theirs is measured at the subjects of many
prompts.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table

from nnsight_engine import LanguageModel, bundled_model_path, save

PROMPT = "The Eiffel Tower is in the city of"
SUBJECT = "Eiffel Tower"
ANSWER = " Paris"
SMALLEST_LOSS = 0.01
"""A probability; where the noise takes less away, its parts mean nothing."""


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """A prompt, its clean run, and the noise that is put on its subject.

    Attributes:
        prompt: The prompt.
        tokens: Its tokens, as text.
        subject: Which of them are the subject.
        answer: The id of the token whose probability is measured.
        hidden: The clean run's residual stream after each layer, ``[layers, tokens, hidden]``.
        clean: The answer's probability in the clean run.
        noise: What is added to the subject's embeddings, ``[samples, subject, hidden]``.
        corrupted: The answer's probability then, the mean over samples.
    """

    prompt: str
    tokens: list[str]
    subject: slice
    answer: int
    hidden: torch.Tensor
    clean: float
    noise: torch.Tensor
    corrupted: float


def load(source: str | None) -> LanguageModel:
    """Load a model, the bundled one for None."""
    return LanguageModel(source or bundled_model_path(), dtype=torch.float32, dispatch=True)


def prepare(
    model: LanguageModel, prompt: str, subject: str, answer: str, *, level: float = 3.0, samples: int = 4
) -> Case:
    """Run the prompt clean and corrupted.

    Args:
        model: The model.
        prompt: The prompt, without the answer.
        subject: A part of it.
        answer: What comes next, one token, with its space.
        level: The noise's standard deviation, as a multiple of the embeddings' own.
        samples: How many draws of noise to average over.

    Raises:
        ValueError: The answer is not one token, or the noise does not make it less likely.
    """
    span = subject_tokens(model, prompt, subject)
    answer_ids = model.tokenizer.encode(answer, add_special_tokens=False)
    if len(answer_ids) != 1:
        raise ValueError(f"the answer must be one token, {answer!r} is {len(answer_ids)}")
    answer_id = answer_ids[0]
    with torch.no_grad(), model.trace(prompt):
        embeddings = save(model.embed.output[0])
        layers = save([layer.output[0] for layer in model.layers])
        clean = save(model.lm_head.output[0, -1].softmax(-1)[answer_id])
    generator = torch.Generator().manual_seed(0)
    shape = samples, span.stop - span.start, embeddings.shape[-1]
    noise = level * embeddings.std() * torch.randn(shape, generator=generator).to(embeddings)
    with torch.no_grad(), model.trace([prompt] * samples):
        model.embed.output[:, span] += noise
        corrupted = save(model.lm_head.output[:, -1].softmax(-1)[:, answer_id].mean())
    if clean - corrupted < SMALLEST_LOSS:
        raise ValueError(
            f"the noise must take {SMALLEST_LOSS} or more of the answer's probability away, which is "
            f"{clean:.3f} without and {corrupted:.3f} with it; take an answer that the model gives"
        )
    tokens = [model.tokenizer.decode(one) for one in model.tokenizer(prompt)["input_ids"]]
    hidden = torch.stack(layers)
    return Case(prompt, tokens, span, answer_id, hidden, clean.item(), noise, corrupted.item())


def subject_tokens(model: LanguageModel, prompt: str, subject: str) -> slice:
    """Return which tokens of the prompt have letters of the subject."""
    start = prompt.index(subject)
    offsets = model.tokenizer(prompt, return_offsets_mapping=True)["offset_mapping"]
    found = [n for n, (low, high) in enumerate(offsets) if high > start and low < start + len(subject)]
    return slice(found[0], found[-1] + 1)


def restore_layer(model: LanguageModel, case: Case, layer: int) -> torch.Tensor:
    """Put the clean state back at each position in turn, after one layer; return ``[tokens]``.

    A batch has a row for each position and sample. The result is the part of the lost probability that
    comes back.
    """
    num_samples, num_tokens = len(case.noise), len(case.tokens)
    with torch.no_grad(), model.trace([case.prompt] * (num_tokens * num_samples)):
        model.embed.output[:, case.subject] += case.noise.repeat(num_tokens, 1, 1)
        stream = model.layers[layer].output
        for position in range(num_tokens):
            rows = slice(position * num_samples, (position + 1) * num_samples)
            stream[rows, position] = case.hidden[layer, position]
        chances = save(model.lm_head.output[:, -1].softmax(-1)[:, case.answer])
    restored: torch.Tensor = chances.view(num_tokens, num_samples).mean(1)
    return (restored - case.corrupted) / (case.clean - case.corrupted)


def trace_map(model: LanguageModel, case: Case, layers: Iterable[int]) -> torch.Tensor:
    """Return the effect of each layer and position, ``[layers, tokens]``."""
    console = Console(stderr=True)
    steps = track(list(layers), "Restoring layer by layer", console=console, transient=True)
    return torch.stack([restore_layer(model, case, layer) for layer in steps])


def draw(case: Case, effects: torch.Tensor, layers: Sequence[int], file: Path) -> None:
    """Draw the map."""
    from nnsight_engine.viz import patching_map  # noqa: PLC0415 - needs the extra [viz]

    label = "part of the answer's probability restored"
    figure = patching_map(effects, tokens=case.tokens, layers=layers, label=label)
    figure.axes[0].set(title="Causal tracing", xlabel="token restored", ylabel="layer restored")
    figure.savefig(file, dpi=150)


def positive(text: str) -> int:
    """Return a number of the command line that must be 1 or more."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {number}")
    return number


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(description="Where a fact passes through the model.")
    parser.add_argument("--model", help="a name or folder of transformers; default: the bundled one")
    parser.add_argument("--prompt", default=PROMPT, help="default: %(default)s")
    parser.add_argument("--subject", default=SUBJECT, help="a part of the prompt; default: %(default)s")
    parser.add_argument("--answer", default=ANSWER, help="one token; default: '%(default)s'")
    parser.add_argument("--samples", type=positive, default=4, help="draws of noise; default: %(default)s")
    parser.add_argument(
        "--every", type=positive, default=3, metavar="N", help="every N-th layer; default: %(default)s"
    )
    parser.add_argument("--save", type=Path, metavar="PICTURE", help="draw the map")
    options = parser.parse_args(arguments)
    if options.save and find_spec("matplotlib") is None:
        parser.error("--save draws with matplotlib: pip install 'nnsight-engine[viz]'")
    if not options.subject or options.subject not in options.prompt:
        parser.error(f"the subject must be a part of the prompt, got {options.subject!r}")
    model = load(options.model)
    try:
        case = prepare(model, options.prompt, options.subject, options.answer, samples=options.samples)
    except ValueError as error:
        parser.error(str(error))
    layers = range(0, len(case.hidden), options.every)
    effects = trace_map(model, case, layers)
    console = Console()
    console.print(f"{escape(options.answer)}: {case.clean:.3f} clean, {case.corrupted:.3f} with noise")
    table = Table(title="Part of that which comes back")
    for column in ("layer", *case.tokens):
        table.add_column(escape(column), justify="right")
    for layer, row in zip(layers, effects, strict=True):
        table.add_row(str(layer), *(f"{value:.2f}" for value in row.tolist()))
    console.print(table)
    if options.save:
        draw(case, effects, layers, options.save)
        console.print(f"Drawn to {options.save}.", soft_wrap=True)


if __name__ == "__main__":
    main()
