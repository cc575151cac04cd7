"""Activation patching: which states carry the difference between two prompts?

Two prompts of the same length differ in a word, and so in their answers. The residual stream of the first
is put into the run of the second, at one layer and one position at a time; what is measured is how much
of the first one's answer that brings back, as a difference of logits.

    python examples/activation_patching.py
    python examples/activation_patching.py --clean "The capital of Japan is" --answer " Tokyo" --every 3

Prints a map of layers × positions: 0 is the second prompt's run, 1 the first one's. Expect the word that
differs in the lower layers and the last token in the upper ones. Takes some seconds on a processor.
``--save`` draws it (needs ``pip install 'nnsight-engine[viz]'``).

The method is described in "How to use and interpret activation patching" (Heimersheim and Nanda, 2024).
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

CLEAN = "The capital of France is"
CORRUPTED = "The capital of Italy is"
ANSWER = " Paris"
OTHER = " Rome"
SMALLEST_DIFFERENCE = 0.1
"""Of logits; where the prompts differ by less, parts of that mean nothing."""


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    """Two prompts whose positions mean the same, and the two answers that tell them apart.

    Attributes:
        clean: Where values come from.
        corrupted: Where they are put.
        answer: The id of the token that the clean prompt asks for.
        other: The id of the one that the corrupted prompt asks for.
        tokens: The tokens of ``clean``, as text.
        clean_difference: The logit of ``answer`` less that of ``other``, after ``clean``.
        corrupted_difference: The same after ``corrupted``.
    """

    clean: str
    corrupted: str
    answer: int
    other: int
    tokens: list[str]
    clean_difference: float
    corrupted_difference: float


def load(source: str | None) -> LanguageModel:
    """Load a model, the bundled one for None."""
    return LanguageModel(source or bundled_model_path(), dtype=torch.float32, dispatch=True)


def align(model: LanguageModel, clean: str, corrupted: str, answer: str, other: str) -> Pair:
    """Run both prompts in one batch.

    Raises:
        ValueError: The prompts are not of one length, the answers are not two tokens, or the first prompt
            does not ask for the first answer more than the second does.
    """
    ids, others = (model.tokenizer(text)["input_ids"] for text in (clean, corrupted))
    if len(ids) != len(others):
        raise ValueError(
            f"both prompts must have the same number of tokens, got {len(ids)} and {len(others)}"
        )
    answer_id, other_id = (token_id(model, text) for text in (answer, other))
    if answer_id == other_id:
        raise ValueError(f"the two answers must be different, got {answer!r} twice")
    with torch.no_grad(), model.trace([clean, corrupted]):
        logits = save(model.lm_head.output[:, -1])
    first, second = (logits[:, answer_id] - logits[:, other_id]).tolist()
    if first - second < SMALLEST_DIFFERENCE:
        raise ValueError(
            f"the logit of {answer!r} less that of {other!r} must be larger after the first prompt than "
            f"after the second, by {SMALLEST_DIFFERENCE} or more; got {first:+.2f} and {second:+.2f}"
        )
    tokens = [model.tokenizer.decode(one) for one in ids]
    return Pair(clean, corrupted, answer_id, other_id, tokens, first, second)


def token_id(model: LanguageModel, answer: str) -> int:
    """Return the id of an answer; raises ValueError where it is not one token."""
    ids = model.tokenizer.encode(answer, add_special_tokens=False)
    if len(ids) != 1:
        raise ValueError(f"an answer must be one token, {answer!r} is {len(ids)}")
    return int(ids[0])


def patch_layer(model: LanguageModel, pair: Pair, layer: int) -> torch.Tensor:
    """Patch the stream after a layer at each position in turn; return the part that comes back, ``[tokens]``.

    Both prompts are in one run: the second block waits at the barrier until the first has read. The corrupted
    prompt is there once for each position.
    """
    num_tokens = len(pair.tokens)
    with torch.no_grad(), model.trace() as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke(pair.clean):
            hidden = model.layers[layer].output[0]
            barrier()
        with tracer.invoke([pair.corrupted] * num_tokens):
            barrier()
            for position in range(num_tokens):
                model.layers[layer].output[position, position] = hidden[position]
            logits: torch.Tensor = save(model.lm_head.output[:, -1])
    difference = logits[:, pair.answer] - logits[:, pair.other]
    return (difference - pair.corrupted_difference) / (pair.clean_difference - pair.corrupted_difference)


def patch_map(model: LanguageModel, pair: Pair, layers: Iterable[int]) -> torch.Tensor:
    """Return the effect of each layer and position, ``[layers, tokens]``."""
    console = Console(stderr=True)
    steps = track(list(layers), "Patching layer by layer", console=console, transient=True)
    return torch.stack([patch_layer(model, pair, layer) for layer in steps])


def draw(pair: Pair, effects: torch.Tensor, layers: Sequence[int], file: Path) -> None:
    """Draw the map."""
    from nnsight_engine.viz import patching_map  # noqa: PLC0415 - needs the extra [viz]

    label = "part of the difference restored"
    figure = patching_map(effects, tokens=pair.tokens, layers=layers, label=label)
    figure.axes[0].set(title="Activation patching", xlabel="token patched")
    figure.savefig(file, dpi=150)


def positive(text: str) -> int:
    """Return a number of the command line that must be 1 or more."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {number}")
    return number


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(description="Which states carry the difference between two prompts.")
    parser.add_argument("--model", help="a name or folder of transformers; default: the bundled one")
    parser.add_argument("--clean", default=CLEAN, help="default: %(default)s")
    parser.add_argument("--corrupted", default=CORRUPTED, help="default: %(default)s")
    parser.add_argument("--answer", default=ANSWER, help="one token, after the first; default: '%(default)s'")
    parser.add_argument("--other", default=OTHER, help="one token, after the second; default: '%(default)s'")
    parser.add_argument(
        "--every", type=positive, default=1, metavar="N", help="every N-th layer; default: all"
    )
    parser.add_argument("--save", type=Path, metavar="PICTURE", help="draw the map")
    options = parser.parse_args(arguments)
    if options.save and find_spec("matplotlib") is None:
        parser.error("--save draws with matplotlib: pip install 'nnsight-engine[viz]'")
    model = load(options.model)
    try:
        pair = align(model, options.clean, options.corrupted, options.answer, options.other)
    except ValueError as error:
        parser.error(str(error))
    last = len(model.layers) - 1
    layers = [*range(0, last, options.every), last]
    effects = patch_map(model, pair, layers)
    console = Console()
    told = f"{escape(options.answer)} less {escape(options.other)}"
    console.print(f"{told}: {pair.clean_difference:+.2f} clean, {pair.corrupted_difference:+.2f} corrupted")
    table = Table(title="Part of that difference which comes back")
    for column in ("layer", *pair.tokens):
        table.add_column(escape(column), justify="right")
    for layer, row in zip(layers, effects, strict=True):
        table.add_row(str(layer), *(f"{value:.2f}" for value in row.tolist()))
    console.print(table)
    if options.save:
        draw(pair, effects, layers, options.save)
        console.print(f"Drawn to {options.save}.", soft_wrap=True)


if __name__ == "__main__":
    main()
