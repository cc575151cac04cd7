"""A sparse autoencoder from a server's activations: train, upload, label, read, steer; over HTTP alone.

Has the server write short texts on twelve topics and captures the residual stream after one layer while it
does. Trains a small top-k autoencoder on these states, stores it on the server as a dictionary, and labels
features by the contexts in which they are most active. Then reads a text by features, and turns one up.

Needs a running server (``make serve``), and ``pip install httpx matplotlib numpy rich safetensors
torch``; where the server has keys, one in the variable ``NNSIGHT_ENGINE_KEY``:

    python -m examples.sae_on_server --folder sae
    python -m examples.sae_on_server --folder sae --topic kitchen --strength 2

The folder gets the states (read again at the next start), the autoencoder in SAELens' layout, its labels and
a picture. Some ten thousand tokens give features of frequent words, of punctuation and of these topics;
real autoencoders see billions.

The autoencoder keeps the largest activations of each token, as in "Scaling and evaluating sparse
autoencoders" (Gao et al., 2024).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch
from rich.console import Console
from rich.markup import escape

from examples.sae_on_server.autoencoder import activations, quality, train, write
from examples.sae_on_server.client import ExampleError, Server
from examples.sae_on_server.corpus import TOPICS, Corpus, collect
from examples.sae_on_server.labels import label_features, topic_feature, vocabulary
from examples.sae_on_server.show import contexts_table, draw, reading_table
from examples.sae_on_server.use import PROMPTS, READ, continuations, read, share, upload

HELD_OUT_EVERY: Final = 10
INTERRUPTED: Final = 130
"""Exit status after Ctrl-C."""


def positive(text: str) -> int:
    """Return a number of the command line that must be 1 or more."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {number}")
    return number


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(
        description="Train a sparse autoencoder on a served model's activations, and use it there.",
        epilog="Where the server has keys, give one in the variable NNSIGHT_ENGINE_KEY.",
    )
    made.add_argument("--base-url", default="http://127.0.0.1:8000", help="default: %(default)s")
    made.add_argument("--folder", type=Path, default=Path("sae"), help="default: %(default)s")
    made.add_argument("--name", default="topics", help="of the dictionary; default: %(default)s")
    made.add_argument("--layer", type=int, help="whose output is read; default: the middle one")
    made.add_argument("--texts", type=positive, default=480, help="default: %(default)s")
    made.add_argument(
        "--text-tokens", type=positive, default=48, help="written in each; default: %(default)s"
    )
    made.add_argument("--features", type=positive, default=1152, help="default: %(default)s")
    made.add_argument("--active", type=positive, default=24, help="features of a token; default: %(default)s")
    made.add_argument("--steps", type=positive, default=1000, help="of training; default: %(default)s")
    made.add_argument("--topic", choices=TOPICS, default="law", help="to steer to; default: %(default)s")
    made.add_argument(
        "--strength", type=float, default=1.0, help="of its largest activation; default: %(default)s"
    )
    made.add_argument(
        "--samples", type=positive, default=4, help="texts of each prompt; default: %(default)s"
    )
    made.add_argument(
        "--max-tokens", type=positive, default=32, help="written when steered; default: %(default)s"
    )
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the example and return its exit status."""
    options = parser().parse_args(arguments)
    if options.active > options.features:
        parser().error(f"--active must be at most --features, {options.features}, got {options.active}")
    try:
        with Server(options.base_url, os.environ.get("NNSIGHT_ENGINE_KEY", "")) as server:
            run(server, options, Console())
    except KeyboardInterrupt:
        return INTERRUPTED
    except ExampleError as error:
        Console(stderr=True).print(f"sae_on_server: {error}", markup=False, highlight=False, soft_wrap=True)
        return 1
    return 0


def run(server: Server, options: argparse.Namespace, console: Console) -> None:
    """Do all of it."""
    folder: Path = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    offered = server.send("GET", "/v1/capabilities")
    layer = offered["sizes"]["num_layers"] // 2 if options.layer is None else options.layer
    corpus = corpus_of(server, folder, offered["model"], layer, options)
    held_out = torch.tensor(corpus.texts) % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
    console.print(f"{len(corpus.tokens)} tokens of {len(corpus.topics)} texts, after layer {layer}.")

    sae, losses = train(
        corpus.states[~held_out], num_features=options.features, k=options.active, steps=options.steps
    )
    found = quality(sae, corpus.states[held_out])
    console.print(
        f"At texts that it was not trained on {found.explained:.0%} of the variance is explained by "
        f"{found.active:.0f} features of a token; {found.alive:.0%} of the features are active there."
    )
    write(sae, folder, layer, offered["model"])

    active = activations(sae, corpus.states)
    labels = label_features(corpus, active)
    feature = topic_feature(corpus, active, options.topic, labels)
    labels[feature] = options.topic
    (folder / "labels.json").write_text(json.dumps(labels, ensure_ascii=False, indent=1), encoding="utf-8")
    console.print(contexts_table(corpus, active, labels))

    dictionary = upload(server, options.name, folder, labels)
    console.print(f"Stored as {dictionary}.")
    reading = read(server, dictionary, READ)
    console.print(reading_table(reading))
    largest = active[:, feature].max().item()
    words, effect = vocabulary(corpus, options.topic), {}
    for strength in (0.0, options.strength / 2, options.strength):
        value = strength * largest
        texts = continuations(
            server,
            dictionary,
            labels[feature],
            value if strength else None,
            samples=options.samples,
            max_tokens=options.max_tokens,
        )
        effect[value] = share(texts, words)
        change = f"set to {value:.0f}" if strength else "not changed"
        console.print(
            f"“{escape(labels[feature])}” {change}: {effect[value]:.1%} of the words are of {options.topic}"
        )
        console.print(
            *(
                f"  {prompt} … {' '.join(text.split())}"
                for prompt, text in zip(PROMPTS, texts[:: options.samples], strict=True)
            ),
            sep="\n",
            markup=False,
        )
    draw(losses, reading, effect, options.topic, folder / "sae.png")
    console.print(f"Drawn to {folder / 'sae.png'}.", soft_wrap=True)


def corpus_of(server: Server, folder: Path, model: str, layer: int, options: argparse.Namespace) -> Corpus:
    """Return the corpus in the folder if it is of these options, or have the server write one."""
    source = {"model": model, "layer": layer, "texts": options.texts, "text_tokens": options.text_tokens}
    corpus = Corpus.load(folder, source)
    if corpus is None:
        corpus = collect(server, layer, options.texts, options.text_tokens)
        corpus.save(folder, source)
    return corpus


if __name__ == "__main__":
    sys.exit(main())
