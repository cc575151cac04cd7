"""Attribution patching: the effect of patching every attention head, estimated by two runs and one gradient.

Patching every head takes a run for each. The first-order estimate of all of them is the difference
between the heads' results in two runs, times the gradient of what is measured: here the logit of one
answer less that of the other. It is an estimate, so every third layer, and those that it singles out, are
patched for real beside it.

    python examples/attribution_patching.py
    python examples/attribution_patching.py --check 1 --save heads.png

Prints the heads with the largest estimates, beside what patching them really does, and how well both agree
over all heads of every third layer (the correlation). Takes some seconds on a processor. ``--save``
draws layers × heads (needs ``pip install 'nnsight-engine[viz]'``).

The method is Nanda's, "Attribution Patching: Activation Patching At Industrial Scale" (2023).
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from nnsight_engine import LanguageModel, bundled_model_path, save

CLEAN = "The capital of France is"
CORRUPTED = "The capital of Italy is"
ANSWER = " Paris"
OTHER = " Rome"
SHOWN = 8


@dataclasses.dataclass(frozen=True, slots=True)
class Attribution:
    """Two runs, and what the gradient says of each head.

    Attributes:
        heads: Each head's result in the clean run, ``[layers, tokens, heads, head_dim]``.
        difference: The logit of the first answer less that of the second, in the corrupted run.
        estimates: What putting the clean head into the corrupted run would change, ``[layers, heads]``.
    """

    heads: torch.Tensor
    difference: float
    estimates: torch.Tensor


def load(source: str | None) -> LanguageModel:
    """Load a model, the bundled one for None."""
    return LanguageModel(source or bundled_model_path(), dtype=torch.float32, dispatch=True)


def attribute(model: LanguageModel, clean: str, corrupted: str, answers: tuple[int, int]) -> Attribution:
    """Run both prompts, the second one with gradients, and estimate every head's effect.

    The model's parameters are frozen: their gradients are not wanted, and as large as the model.
    """
    answer, other = answers
    model.requires_grad_(requires_grad=False)
    with torch.no_grad(), model.trace(clean):
        clean_heads = save(
            [model.points[f"layers.{layer}.attn.heads"][0] for layer in range(len(model.layers))]
        )
    with model.trace(corrupted):
        model.embed.output.requires_grad_()  # gradients go back to here
        heads: list[Any] = save(
            [model.points[f"layers.{layer}.attn.heads"] for layer in range(len(model.layers))]
        )
        logits = model.lm_head.output[0, -1]
        difference = save(logits[answer] - logits[other])
        with difference.backward():  # gradients come in the reverse order
            gradients = save([result.grad[0] for result in reversed(heads)])
    there, here = torch.stack(clean_heads), torch.stack([one.detach()[0] for one in heads])
    estimates = ((there - here) * torch.stack(gradients).flip(0)).sum((1, 3))
    return Attribution(there, difference.item(), estimates)


def patch_heads(
    model: LanguageModel, corrupted: str, answers: tuple[int, int], found: Attribution, layer: int
) -> torch.Tensor:
    """Put each clean head of a layer into the corrupted run, a row for each: ``[heads]`` effects."""
    num_heads = found.heads.shape[2]
    with torch.no_grad(), model.trace([corrupted] * num_heads):
        results = model.points[f"layers.{layer}.attn.heads"]
        for head in range(num_heads):
            results[head, :, head] = found.heads[layer, :, head]
        logits: torch.Tensor = save(model.lm_head.output[:, -1])
    return logits[:, answers[0]] - logits[:, answers[1]] - found.difference


def patch_layers(
    model: LanguageModel, corrupted: str, answers: tuple[int, int], found: Attribution, layers: Iterable[int]
) -> torch.Tensor:
    """Patch all heads of the layers for real; return ``[layers, heads]``."""
    console = Console(stderr=True)
    steps = track(list(layers), "Patching for real", console=console, transient=True)
    return torch.stack([patch_heads(model, corrupted, answers, found, layer) for layer in steps])


def agreement(estimates: torch.Tensor, effects: torch.Tensor) -> float:
    """Return the correlation of estimates with effects."""
    return float(torch.corrcoef(torch.stack([estimates.flatten(), effects.flatten()]))[0, 1])


def check(model: LanguageModel, clean: str, corrupted: str, answer: str, other: str) -> tuple[int, int]:
    """Return the ids of the answers.

    Raises:
        ValueError: The prompts are not of one length or are the same, or the answers are not two tokens.
    """
    ids, others = (model.tokenizer(text)["input_ids"] for text in (clean, corrupted))
    if len(ids) != len(others):
        raise ValueError(
            f"both prompts must have the same number of tokens, got {len(ids)} and {len(others)}"
        )
    if ids == others:
        raise ValueError(f"the two prompts must be different, got {clean!r} twice")
    answer_id, other_id = (token_id(model, text) for text in (answer, other))
    if answer_id == other_id:
        raise ValueError(f"the two answers must be different, got {answer!r} twice")
    return answer_id, other_id


def token_id(model: LanguageModel, answer: str) -> int:
    """Return the id of an answer; raises ValueError where it is not one token."""
    ids = model.tokenizer.encode(answer, add_special_tokens=False)
    if len(ids) != 1:
        raise ValueError(f"an answer must be one token, {answer!r} is {len(ids)}")
    return int(ids[0])


def draw(estimates: torch.Tensor, file: Path) -> None:
    """Draw layers × heads."""
    from nnsight_engine.viz import patching_map  # noqa: PLC0415 - needs the extra [viz]

    heads = [str(head) for head in range(estimates.shape[1])]
    figure = patching_map(estimates, tokens=heads, label="estimated effect on the logit difference")
    figure.axes[0].set(title="Attribution patching", xlabel="head", ylabel="layer")
    figure.savefig(file, dpi=150)


def positive(text: str) -> int:
    """Return a number of the command line that must be 1 or more."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {number}")
    return number


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(description="Estimate the effect of patching every head.")
    parser.add_argument("--model", help="a name or folder of transformers; default: the bundled one")
    parser.add_argument("--clean", default=CLEAN, help="default: %(default)s")
    parser.add_argument("--corrupted", default=CORRUPTED, help="of as many tokens; default: %(default)s")
    parser.add_argument("--answer", default=ANSWER, help="one token, after the first; default: '%(default)s'")
    parser.add_argument("--other", default=OTHER, help="one token, after the second; default: '%(default)s'")
    parser.add_argument(
        "--check", type=positive, default=3, metavar="N", help="patch every N-th layer; default: %(default)s"
    )
    parser.add_argument("--save", type=Path, metavar="PICTURE", help="draw the estimates")
    options = parser.parse_args(arguments)
    if options.save and find_spec("matplotlib") is None:
        parser.error("--save draws with matplotlib: pip install 'nnsight-engine[viz]'")
    model = load(options.model)
    try:
        answers = check(model, options.clean, options.corrupted, options.answer, options.other)
    except ValueError as error:
        parser.error(str(error))
    found = attribute(model, options.clean, options.corrupted, answers)
    num_layers, num_heads = found.estimates.shape
    largest = [
        divmod(place, num_heads) for place in found.estimates.flatten().abs().topk(SHOWN).indices.tolist()
    ]
    checked = range(0, num_layers, options.check)
    layers = sorted({*checked, *(layer for layer, _ in largest)})
    effects = patch_layers(model, options.corrupted, answers, found, layers)
    table = Table(title="Heads with the largest estimates")
    for column in ("layer", "head", "estimate", "patched"):
        table.add_column(column, justify="right")
    for layer, head in largest:
        values = found.estimates[layer, head], effects[layers.index(layer), head]
        table.add_row(str(layer), str(head), *(f"{value.item():+.3f}" for value in values))
    console = Console()
    console.print(table)
    # Layers that are patched for their large estimates would flatter it.
    sample = effects[[layers.index(layer) for layer in checked]]
    correlation = agreement(found.estimates[list(checked)], sample)
    told = f"{sample.numel()} heads, those of one layer in {options.check}"
    console.print(f"Correlation over {told}: {correlation:.2f}")
    if options.save:
        draw(found.estimates, options.save)
        console.print(f"Drawn to {options.save}.", soft_wrap=True)


if __name__ == "__main__":
    main()
