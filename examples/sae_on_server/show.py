"""The tables and the picture that the example shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from matplotlib.figure import Figure
from rich.markup import escape
from rich.table import Table

from examples.sae_on_server.corpus import Corpus
from examples.sae_on_server.labels import top_contexts
from examples.sae_on_server.use import Reading


def draw(
    losses: Sequence[float], reading: Reading, effect: Mapping[float, float], topic: str, file: Path
) -> None:
    """Draw the loss, a text's features, and the effect of the topic's feature by its value."""
    figure = Figure(figsize=(13, 8), layout="constrained")
    axes = figure.subplot_mosaic([["loss", "steering"], ["text", "text"]])
    axes["loss"].plot(losses, linewidth=0.8)
    axes["loss"].set(xlabel="step", ylabel="unexplained variance", ylim=(0, None), title="Training")
    axes["steering"].plot(list(effect), [100 * part for part in effect.values()], marker="o")
    axes["steering"].set(
        xlabel="activation that the feature is set to, 0: not changed",
        ylabel=f"words of {topic} (%)",
        ylim=(0, None),
        title="Steering",
    )
    names, values = reading.rows(12)
    text = axes["text"]
    image = text.imshow(values, aspect="auto", cmap="viridis", interpolation="nearest")
    tokens = [one.strip() for one in reading.tokens]
    text.set_xticks(range(len(tokens)), tokens, rotation=60, ha="right", rotation_mode="anchor")
    text.set_yticks(range(len(names)), names)
    text.set_title("Features of a text")
    figure.colorbar(image, ax=text, label="activation")
    figure.savefig(file, dpi=110)


def contexts_table(corpus: Corpus, active: torch.Tensor, labels: dict[int, str], num_rows: int = 12) -> Table:
    """Return some labelled features with their most active contexts, a topic's or a kind's once."""
    table = Table(title=f"{len(labels)} of {active.shape[1]} features have a label", show_lines=True)
    for column in ("feature", "label", "most active at the end of"):
        table.add_column(column, justify="right" if column == "feature" else "left")
    firsts = {text.partition(":")[0].partition("“")[0]: one for one, text in reversed(labels.items())}
    for feature in sorted(firsts.values())[:num_rows]:
        best = top_contexts(active, feature)[:3]
        contexts = "\n".join(repr(corpus.context(one)) for one in best)
        table.add_row(str(feature), escape(labels[feature]), escape(contexts))
    return table


def reading_table(reading: Reading) -> Table:
    """Return each token with its strongest features that have a label."""
    table = Table(title="A text by its features")
    table.add_column("token")
    table.add_column("features")
    for token, found in zip(reading.tokens, reading.features, strict=True):
        named = [f"{text} {value:.0f}" for _, text, value in found if text is not None]
        table.add_row(escape(repr(token)), escape(" · ".join(named[:3])))
    return table
