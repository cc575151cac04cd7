"""Train a linear probe: from which layer on can it be read off whether a sentence praises or complains?

Sentences are made of patterns; those that the probe is tested on have other adjectives and other things
than those that it learns from, so it cannot know words by heart. A probe is trained at every layer, on
the residual stream at the last token. Others learn labels that were shuffled, a permutation baseline:
what they get right is chance.

    python examples/train_probe.py
    python examples/train_probe.py --steps 500 --shuffles 10 --save probe.png

Prints the accuracy on held-out sentences, layer by layer. Expect nearly all of them to be right in the
upper half, and about one half of them with shuffled labels. Takes some seconds on a processor. ``--save``
draws both by layer (needs ``pip install 'nnsight-engine[viz]'``).

Probes are those of "Understanding intermediate layers using linear classifier probes" (Alain and Bengio,
2016).
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from nnsight_engine import LanguageModel, bundled_model_path, save

PATTERNS = ("The {thing} was {adjective}.", "We thought that the {thing} was really {adjective}.")
THINGS = ("film", "meal")
PRAISE = ("wonderful", "excellent", "lovely", "perfect", "brilliant", "charming", "beautiful", "great")
COMPLAINT = ("horrible", "disgusting", "terrible", "awful", "boring", "nasty", "ugly", "disappointing")
HELD_OUT_THINGS = ("book", "garden")
HELD_OUT_PRAISE = ("fantastic", "delightful", "superb", "amazing")
HELD_OUT_COMPLAINT = ("dreadful", "unpleasant", "miserable", "dull")


@dataclasses.dataclass(frozen=True, slots=True)
class Examples:
    """Sentences and their labels.

    Attributes:
        sentences: The sentences.
        labels: 1 for praise, 0 for a complaint, ``[sentences]``.
    """

    sentences: list[str]
    labels: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Probes:
    """A linear probe for each layer, on activations that are normalized first.

    Attributes:
        mean: Of the training activations, ``[layers, 1, hidden]``.
        deviation: Their standard deviation, likewise.
        weights: ``[layers, hidden]``.
        bias: ``[layers]``.
    """

    mean: torch.Tensor
    deviation: torch.Tensor
    weights: torch.Tensor
    bias: torch.Tensor

    def logits(self, activations: torch.Tensor) -> torch.Tensor:
        """Return ``[layers, sentences]``, above 0 for praise, of ``[layers, sentences, hidden]``."""
        normalized = (activations - self.mean) / self.deviation
        return torch.einsum("lsh,lh->ls", normalized, self.weights) + self.bias[:, None]

    def accuracy(self, activations: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the part of the sentences that each layer's probe gets right, ``[layers]``."""
        return ((self.logits(activations) > 0) == labels.bool()).float().mean(1)


def load(source: str | None) -> LanguageModel:
    """Load a model, the bundled one for None."""
    return LanguageModel(source or bundled_model_path(), dtype=torch.float32, dispatch=True)


def make_examples(things: Sequence[str], praise: Sequence[str], complaint: Sequence[str]) -> Examples:
    """Fill the patterns with every thing and every adjective."""
    sentences, labels = [], []
    for label, adjectives in ((1.0, praise), (0.0, complaint)):
        for pattern, thing, adjective in itertools.product(PATTERNS, things, adjectives):
            sentences.append(pattern.format(thing=thing, adjective=adjective))
            labels.append(label)
    return Examples(sentences, torch.tensor(labels))


def read_activations(model: LanguageModel, sentences: Sequence[str], batch: int = 32) -> torch.Tensor:
    """Return the residual stream at the last token after each layer, ``[layers, sentences, hidden]``."""
    console = Console(stderr=True)
    parts = []
    for start in track(range(0, len(sentences), batch), "Reading", console=console, transient=True):
        with torch.no_grad(), model.trace(list(sentences[start : start + batch])):
            layers = save([layer.output[:, -1] for layer in model.layers])
        parts.append(torch.stack(layers))
    return torch.cat(parts, 1)


def train(activations: torch.Tensor, labels: torch.Tensor, *, steps: int = 100, decay: float = 0.1) -> Probes:
    """Fit a logistic regression for each layer, all at once, with weights that decay."""
    mean, deviation = activations.mean(1, keepdim=True), activations.std(1, keepdim=True) + 1e-6
    weights = torch.zeros(activations.shape[0], activations.shape[2], requires_grad=True)
    bias = torch.zeros(activations.shape[0], requires_grad=True)
    probes = Probes(mean, deviation, weights, bias)
    targets = labels.expand(activations.shape[0], -1)
    optimizer = torch.optim.AdamW([weights, bias], lr=0.01, weight_decay=decay)
    for _ in range(steps):
        optimizer.zero_grad()
        torch.nn.functional.binary_cross_entropy_with_logits(probes.logits(activations), targets).backward()
        optimizer.step()
    return Probes(mean, deviation, weights.detach(), bias.detach())


def shuffled_accuracy(
    activations: torch.Tensor,
    learnt: Examples,
    unseen: torch.Tensor,
    held_out: Examples,
    *,
    shuffles: int,
    steps: int,
) -> torch.Tensor:
    """Return what probes of shuffled labels get right, the mean over ``shuffles`` orders: ``[layers]``."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(shuffles):
        order = torch.randperm(len(learnt.labels), generator=generator)
        probes = train(activations, learnt.labels[order], steps=steps)
        found.append(probes.accuracy(unseen, held_out.labels))
    return torch.stack(found).mean(0)


def draw(accuracy: torch.Tensor, shuffled: torch.Tensor, file: Path) -> None:
    """Draw the accuracy by layer."""
    from nnsight_engine.viz import Picture  # noqa: PLC0415 - needs the extra [viz]

    figure = Picture(figsize=(6, 3.5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(accuracy, marker=".", label="probe")
    axes.plot(shuffled, marker=".", color="gray", label="shuffled labels")
    axes.axhline(0.5, color="gray", linewidth=0.8, linestyle=":")
    axes.set(title="Praise or complaint?", xlabel="layer", ylabel="accuracy, held out", ylim=(0, 1.03))
    axes.legend(loc="lower right")
    figure.savefig(file, dpi=150)


def positive(text: str) -> int:
    """Return a number of the command line that must be 1 or more."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {number}")
    return number


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(description="Train a linear probe at every layer.")
    parser.add_argument("--model", help="a name or folder of transformers; default: the bundled one")
    parser.add_argument("--steps", type=positive, default=100, help="of training; default: %(default)s")
    parser.add_argument("--shuffles", type=positive, default=4, help="of the labels; default: %(default)s")
    parser.add_argument("--save", type=Path, metavar="PICTURE", help="draw the accuracy by layer")
    options = parser.parse_args(arguments)
    if options.save and find_spec("matplotlib") is None:
        parser.error("--save draws with matplotlib: pip install 'nnsight-engine[viz]'")
    model, console = load(options.model), Console()
    learnt = make_examples(THINGS, PRAISE, COMPLAINT)
    held_out = make_examples(HELD_OUT_THINGS, HELD_OUT_PRAISE, HELD_OUT_COMPLAINT)
    activations = read_activations(model, learnt.sentences)
    unseen = read_activations(model, held_out.sentences)
    with console.status("Training"):
        probes = train(activations, learnt.labels, steps=options.steps)
        accuracy = probes.accuracy(unseen, held_out.labels)
        shuffled = shuffled_accuracy(
            activations, learnt, unseen, held_out, shuffles=options.shuffles, steps=options.steps
        )
    table = Table(title=f"Accuracy on {len(held_out.sentences)} held-out sentences")
    for column in ("layer", "probe", "shuffled labels"):
        table.add_column(column, justify="right")
    for layer, (real, chance) in enumerate(zip(accuracy, shuffled, strict=True)):
        table.add_row(str(layer), f"{real:.2f}", f"{chance:.2f}")
    console.print(table)
    if options.save:
        draw(accuracy, shuffled, options.save)
        console.print(f"Drawn to {options.save}.", soft_wrap=True)


if __name__ == "__main__":
    main()
