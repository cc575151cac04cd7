"""Induction heads: heads that find what came after the same token before.

Tokens are drawn at random and repeated once, so nothing but the repetition can help to predict the second
half. A head that looks from a token to the one after its earlier occurrence is an induction head; how
much of its attention goes there is its score. Then the highest ones are silenced, and as many others of
the same layers beside them: only the first makes the model forget how the tokens went on.

    python examples/induction_heads.py
    python examples/induction_heads.py --heads 20 --save head.png

Prints the heads with the highest scores, and the mean log-probability of the repeated tokens. Takes some
seconds on a processor. ``--save`` draws the highest head's attention (needs ``pip install
'nnsight-engine[viz]'``).

The method is that of "In-context Learning and Induction Heads" (Olsson et al., 2022).
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Sequence
from importlib.util import find_spec
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from nnsight_engine import LanguageModel, bundled_model_path, save

Head = tuple[int, int]
"""A layer and a head of it."""


def load(source: str | None) -> LanguageModel:
    """Load a model, the bundled one for None."""
    return LanguageModel(source or bundled_model_path(), dtype=torch.float32, dispatch=True)


def repeated_tokens(model: LanguageModel, length: int, rows: int, seed: int = 0) -> torch.Tensor:
    """Return random tokens, each row twice in a row: ``[rows, 2 × length]``."""
    generator = torch.Generator().manual_seed(seed)
    # Low ids are single bytes, in most vocabularies.
    special = set(model.tokenizer.all_special_ids)
    ordinary = torch.tensor([token for token in range(1000, len(model.tokenizer)) if token not in special])
    half = ordinary[torch.randint(len(ordinary), (rows, length), generator=generator)]
    return torch.cat([half, half], 1)


def read_patterns(model: LanguageModel, tokens: torch.Tensor) -> torch.Tensor:
    """Return attention probabilities, ``[layers, rows, heads, queries, keys]``."""
    with torch.no_grad(), model.trace(tokens):
        patterns = save([model.points[f"layers.{layer}.attn.pattern"] for layer in range(len(model.layers))])
    return torch.stack(patterns)


def induction_scores(patterns: torch.Tensor) -> torch.Tensor:
    """Return how much each head looks to what came after the same token, ``[layers, heads]``."""
    length = patterns.shape[-1] // 2
    # Queries of the second half; from query q the earlier occurrence is key q - length.
    looks = patterns.diagonal(1 - length, -2, -1)[..., 1:]
    return looks.mean((1, 3))


def highest(scores: torch.Tensor, count: int) -> list[Head]:
    """Return the heads with the highest scores."""
    places = scores.flatten().topk(count).indices.tolist()
    return [divmod(place, scores.shape[1]) for place in places]


def others(scores: torch.Tensor, heads: Collection[Head], seed: int = 0) -> list[Head]:
    """Return as many heads of the same layers, if they have so many that score below average, at random."""
    layers = {layer for layer, _ in heads}
    low = [
        (layer, head)
        for layer in sorted(layers)
        for head in range(scores.shape[1])
        if scores[layer, head] < scores.mean()
    ]
    order = torch.randperm(len(low), generator=torch.Generator().manual_seed(seed)).tolist()
    return [low[place] for place in order[: len(heads)]]


def log_probability(model: LanguageModel, tokens: torch.Tensor, silenced: Collection[Head] = ()) -> float:
    """Return the mean log-probability of the second half's tokens, with some heads silenced."""
    with torch.no_grad(), model.trace(tokens):
        for layer, head in sorted(silenced):
            model.points[f"layers.{layer}.attn.heads"][:, :, head] = 0
        logits = save(model.lm_head.output)
    length = tokens.shape[1] // 2
    said = logits[:, length:-1].log_softmax(-1)
    return float(said.gather(-1, tokens[:, length + 1 :, None]).mean())


def draw(patterns: torch.Tensor, head: Head, file: Path) -> None:
    """Draw one head's attention on the first row."""
    from nnsight_engine.viz import attention_maps  # noqa: PLC0415 - needs the extra [viz]

    layer, number = head
    figure = attention_maps(patterns[layer, 0], heads=[number], layer=layer)
    figure.axes[0].set(xlabel="key position", ylabel="query position")
    figure.savefig(file, dpi=150)


def positive(text: str) -> int:
    """Return a number of the command line that must be 1 or more."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {number}")
    return number


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(description="Find induction heads, and silence them.")
    parser.add_argument("--model", help="a name or folder of transformers; default: the bundled one")
    parser.add_argument("--length", type=int, default=24, help="before they repeat; default: %(default)s")
    parser.add_argument("--rows", type=positive, default=4, help="draws of tokens; default: %(default)s")
    parser.add_argument(
        "--heads", type=positive, default=10, help="how many to silence; default: %(default)s"
    )
    parser.add_argument("--save", type=Path, metavar="PICTURE", help="draw the highest head's attention")
    options = parser.parse_args(arguments)
    if options.length < 2:
        parser.error(f"--length must be 2 or more, got {options.length}")
    if options.save and find_spec("matplotlib") is None:
        parser.error("--save draws with matplotlib: pip install 'nnsight-engine[viz]'")
    model, console = load(options.model), Console()
    tokens = repeated_tokens(model, options.length, options.rows)
    with console.status("Reading attention"):
        patterns = read_patterns(model, tokens)
        scores = induction_scores(patterns)
    if options.heads > scores.numel():
        parser.error(f"--heads must be at most {scores.numel()}, all that there are, got {options.heads}")
    found = highest(scores, options.heads)
    table = Table(title="Induction heads")
    for column in ("layer", "head", "score"):
        table.add_column(column, justify="right")
    for layer, head in found:
        table.add_row(str(layer), str(head), f"{scores[layer, head]:.3f}")
    console.print(table)
    console.print(f"mean score of all heads: {scores.mean():.3f}")
    beside = others(scores, found)
    cases: dict[str, Collection[Head]] = {
        "all heads": (),
        f"without these {len(found)}": found,
        f"without {len(beside)} others": beside,
    }
    for name, silenced in cases.items():
        value = log_probability(model, tokens, silenced)
        console.print(f"mean log-probability of the repeated tokens, {name}: {value:.2f}")
    if options.save:
        draw(patterns, found[0], options.save)
        console.print(f"Drawn to {options.save}.", soft_wrap=True)


if __name__ == "__main__":
    main()
