"""Read the logit lens: what each layer of a model would say next, if it were the last.

The model's own final norm and unembedding are applied to the residual stream after each layer. Early
layers say nothing of use; somewhere in the upper half the answer comes to the top, and stays there.

    python examples/logit_lens.py
    python examples/logit_lens.py --prompt "The opposite of hot is" --save lens.png

Prints, for each layer, its most likely next token and the rank of the token that the model says in the
end; ``--save`` draws all tokens of the prompt (needs ``pip install 'nnsight-engine[viz]'``). Takes some
seconds.

The method is nostalgebraist's, "interpreting GPT: the logit lens" (2020).
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from nnsight_engine import LanguageModel, bundled_model_path, save

PROMPT = "The Eiffel Tower is in the city of"


@dataclasses.dataclass(frozen=True, slots=True)
class LensRow:
    """What one layer would say after the prompt.

    Attributes:
        layer: Which, from 0.
        token: Its most likely next token.
        probability: How likely it holds that to be.
        rank: The place, from 1, that it gives to the token that the last layer puts first.
    """

    layer: int
    token: str
    probability: float
    rank: int


def load(source: str | None) -> LanguageModel:
    """Load a model, the bundled one for None."""
    return LanguageModel(source or bundled_model_path(), dtype=torch.float32, dispatch=True)


def read_lens(model: LanguageModel, prompt: str) -> torch.Tensor:
    """Return log-probabilities of the next token, ``[layers, tokens, vocabulary]``."""
    with torch.no_grad(), model.trace(prompt):
        layers = save([model.lm_head(model.norm(layer.output))[0].log_softmax(-1) for layer in model.layers])
    return torch.stack(layers)


def rows_of(model: LanguageModel, lens: torch.Tensor) -> list[LensRow]:
    """Return what each layer says at the last token."""
    last = lens[:, -1]
    answer = last[-1].argmax()
    ranks = 1 + (last > last[:, answer, None]).sum(-1)
    best = last.max(-1)
    return [
        LensRow(layer, model.tokenizer.decode(int(token)), chance.exp().item(), int(rank))
        for layer, (token, chance, rank) in enumerate(zip(best.indices, best.values, ranks, strict=True))
    ]


def settles_at(rows: Sequence[LensRow]) -> int:
    """Return the layer from which on the model's answer stays in the first place."""
    return max((row.layer + 1 for row in rows if row.rank > 1), default=0)


def draw(model: LanguageModel, prompt: str, lens: torch.Tensor, file: Path) -> None:
    """Draw layers × tokens."""
    from nnsight_engine.viz import lens_map  # noqa: PLC0415 - needs the extra [viz], which a table does not

    tokens = [model.tokenizer.decode(one) for one in model.tokenizer(prompt)["input_ids"]]
    figure = lens_map(lens, tokens=tokens, decode=model.tokenizer)
    figure.axes[0].set_title("The logit lens")
    figure.savefig(file, dpi=150)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(description="What each layer would say next.")
    parser.add_argument("--model", help="a name or folder of transformers; default: the bundled one")
    parser.add_argument("--prompt", default=PROMPT, help="default: %(default)s")
    parser.add_argument("--save", type=Path, metavar="PICTURE", help="draw layers × tokens")
    options = parser.parse_args(arguments)
    if options.save and find_spec("matplotlib") is None:
        parser.error("--save draws with matplotlib: pip install 'nnsight-engine[viz]'")
    model = load(options.model)
    lens = read_lens(model, options.prompt)
    rows = rows_of(model, lens)
    table = Table(title=f"{escape(options.prompt)} …")
    for column in ("layer", "most likely next", "probability", "rank of the answer"):
        table.add_column(column, justify="left" if column.startswith("most") else "right")
    for row in rows:
        table.add_row(str(row.layer), escape(repr(row.token)), f"{row.probability:.3f}", str(row.rank))
    console = Console()
    console.print(table)
    console.print(f"{escape(repr(rows[-1].token))} is first from layer {settles_at(rows)} on.")
    if options.save:
        draw(model, options.prompt, lens, options.save)
        console.print(f"Drawn to {options.save}.", soft_wrap=True)


if __name__ == "__main__":
    main()
