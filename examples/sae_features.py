"""A sparse autoencoder in a trace: train a small one, find a feature of a topic, and turn it up.

A sparse autoencoder writes each state of the residual stream as a sum of a few directions out of many.
Here one is trained on the model's states at some hundred sentences on four topics, which takes some
seconds and gives features of these topics and little else; real ones see billions of tokens. In a trace
it is ordinary code: it reads which features are active, and adds what a feature's change does to the
stream.

    python examples/sae_features.py
    python examples/sae_features.py --topic kitchen --strength 2

Prints how well held-out sentences are rebuilt, what the feature is at sentences of a pattern that it
never saw, by topic, and what it does to the topics' words, and to the text, when it is turned up: more
for some topics than for others, since the training is short, and turned up far, the model babbles. Takes
a quarter of a minute on a processor.

The autoencoder keeps the largest activations of each token, as in "Scaling and evaluating sparse
autoencoders" (Gao et al., 2024).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table

from nnsight_engine import LanguageModel, bundled_model_path, save

TOPICS = {
    "sea": ("sailor", "ship", "wave", "harbour", "fish", "captain"),
    "money": ("bank", "loan", "tax", "investor", "salary", "market"),
    "kitchen": ("cook", "soup", "oven", "recipe", "bread", "knife"),
    "space": ("planet", "rocket", "astronaut", "star", "moon", "comet"),
}
PATTERNS = (
    "Nobody had expected the {first} and the {second} to be there.",
    "In this story, a {first} is more important than a {second}.",
    "My grandmother often told me about the {first}, and then about the {second}.",
    "Why would a {first} need another {second}?",
    "The {first} was old, but the {second} was new and shone in the light.",
    "She bought a book about a {first} because her brother had one about a {second}.",
    "First came the {first}, then came the {second}, and we all cheered.",
    "It is hard to think of a {first} without thinking of a {second}.",
)
HELD_OUT = "They talked for hours about a {first} and a {second} that they had seen."
PROMPT = "When I woke up this morning, I thought about"


class SparseAutoencoder(torch.nn.Module):
    """An autoencoder whose features are all zero but for the ``active`` largest of each token."""

    def __init__(self, width: int, num_features: int, active: int, generator: torch.Generator) -> None:
        """Start with decoder directions at random, of length 1, and the encoder as their transpose."""
        super().__init__()
        self.active = active
        self.encoder = torch.nn.Linear(width, num_features)
        self.decoder = torch.nn.Linear(num_features, width)
        with torch.no_grad():
            self.decoder.weight.normal_(generator=generator)
            self.decoder.weight /= self.decoder.weight.norm(dim=0)
            self.encoder.weight.copy_(self.decoder.weight.T)
            self.encoder.bias.zero_()

    def encode(self, states: torch.Tensor) -> torch.Tensor:
        """Return the features, ``[…, features]``, of ``[…, width]``."""
        found = torch.relu(self.encoder(states - self.decoder.bias))
        largest = found.topk(self.active, dim=-1)
        return torch.zeros_like(found).scatter(-1, largest.indices, largest.values)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return the states as the features rebuild them."""
        rebuilt: torch.Tensor = self.decoder(self.encode(states))
        return rebuilt


def load(source: str | None) -> LanguageModel:
    """Load a model, the bundled one for None."""
    return LanguageModel(source or bundled_model_path(), dtype=torch.float32, dispatch=True)


def sentences(topic: str, patterns: Sequence[str] = PATTERNS) -> list[str]:
    """Return sentences on a topic: each of its words, and the one after it, in every pattern."""
    words = TOPICS[topic]
    pairs = list(zip(words, words[1:] + words[:1], strict=True))
    return [pattern.format(first=first, second=second) for pattern in patterns for first, second in pairs]


def read_states(model: LanguageModel, texts: Sequence[str], layer: int, batch: int = 16) -> torch.Tensor:
    """Return the residual stream after a layer at all tokens but each text's first, ``[tokens, hidden]``.

    The first token's state is many times longer than the others', whatever it says.
    """
    parts = []
    for start in range(0, len(texts), batch):
        chosen = list(texts[start : start + batch])
        with torch.no_grad(), model.trace(chosen) as tracer:
            states = save(model.layers[layer].output)
            tracer.stop()
        lengths = [len(ids) for ids in model.tokenizer(chosen)["input_ids"]]
        # Texts are filled up on the left.
        parts += [row[len(row) - length + 1 :] for row, length in zip(states, lengths, strict=True)]
    return torch.cat(parts)


def train(
    states: torch.Tensor, *, features: int = 512, active: int = 16, steps: int = 200
) -> SparseAutoencoder:
    """Train an autoencoder on states, ``[tokens, hidden]``."""
    generator = torch.Generator().manual_seed(0)
    sae = SparseAutoencoder(states.shape[1], features, active, generator)
    with torch.no_grad():
        sae.decoder.bias.copy_(states.mean(0))
    optimizer = torch.optim.Adam(sae.parameters(), lr=2e-3)
    console = Console(stderr=True)
    for _ in track(range(steps), "Training the autoencoder", console=console, transient=True):
        chosen = states[torch.randint(len(states), (256,), generator=generator)]
        optimizer.zero_grad()
        (sae(chosen) - chosen).square().mean().backward()
        optimizer.step()
        with torch.no_grad():  # a feature's size is its activation, not its direction's length
            sae.decoder.weight /= sae.decoder.weight.norm(dim=0)
    return sae.requires_grad_(requires_grad=False)


def explained(sae: SparseAutoencoder, states: torch.Tensor) -> float:
    """Return the part of the states' variance that the features rebuild."""
    return 1 - float((sae(states) - states).square().sum() / (states - states.mean(0)).square().sum())


def topic_feature(sae: SparseAutoencoder, states: dict[str, torch.Tensor], topic: str) -> int:
    """Return the feature that is most more active at a topic's states than at all others'."""
    others = torch.cat([value for name, value in states.items() if name != topic])
    return int((sae.encode(states[topic]).mean(0) - sae.encode(others).mean(0)).argmax())


def set_feature(stream: torch.Tensor, sae: SparseAutoencoder, feature: int, value: float) -> None:
    """Set a feature, in place, by what that changes in the stream: what the features cannot express stays.

    A prompt's first token is left alone: the autoencoder was not trained on such states.
    """
    if stream.shape[1] > 1:  # else it is a token that the model wrote
        stream = stream[:, 1:]
    change = value - sae.encode(stream)[..., feature]
    stream += change[..., None] * sae.decoder.weight[:, feature]


def write(
    model: LanguageModel,
    sae: SparseAutoencoder,
    layer: int,
    feature: int,
    *,
    value: float | None = None,
    max_tokens: int = 24,
) -> str:
    """Write on from the prompt; with ``value`` the feature is set to it at every token but the first."""
    with torch.no_grad(), model.generate(PROMPT, max_new_tokens=max_tokens, do_sample=False) as tracer:
        for _ in tracer.iter[:]:
            if value is not None:
                set_feature(model.layers[layer].output, sae, feature, value)
        tokens = save(tracer.result)
    written = tokens[0, len(model.tokenizer(PROMPT)["input_ids"]) :]
    text = model.tokenizer.decode(written, skip_special_tokens=True)
    return " ".join(text.split())


def word_chances(
    model: LanguageModel, sae: SparseAutoencoder, layer: int, feature: int, value: float | None = None
) -> dict[str, float]:
    """Return the mean log-probability of each topic's words, after the prompt and "the"."""
    with torch.no_grad(), model.trace(f"{PROMPT} the"):
        if value is not None:
            set_feature(model.layers[layer].output, sae, feature, value)
        chances = save(model.lm_head.output[0, -1].log_softmax(-1))
    first = {
        topic: [model.tokenizer.encode(f" {word}", add_special_tokens=False)[0] for word in words]
        for topic, words in TOPICS.items()
    }
    return {topic: chances[ids].mean().item() for topic, ids in first.items()}


def positive(text: str) -> int:
    """Return a number of the command line that must be 1 or more."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {number}")
    return number


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(description="Train a small sparse autoencoder, and use a feature of it.")
    parser.add_argument("--model", help="a name or folder of transformers; default: the bundled one")
    parser.add_argument("--layer", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--topic", choices=TOPICS, default="money", help="default: %(default)s")
    parser.add_argument(
        "--strength", type=float, default=1.5, help="of its largest activation; default: %(default)s"
    )
    parser.add_argument("--steps", type=positive, default=200, help="of training; default: %(default)s")
    parser.add_argument("--max-tokens", type=positive, default=24, help="default: %(default)s")
    options = parser.parse_args(arguments)
    model, console = load(options.model), Console()
    num_layers = len(model.layers)
    if not -num_layers <= options.layer < num_layers:
        parser.error(f"--layer must be between {-num_layers} and {num_layers - 1}, got {options.layer}")
    with console.status("Reading states"):
        states = {topic: read_states(model, sentences(topic), options.layer) for topic in TOPICS}
        unseen = {topic: read_states(model, sentences(topic, [HELD_OUT]), options.layer) for topic in TOPICS}
    sae = train(torch.cat(list(states.values())), steps=options.steps)
    part = explained(sae, torch.cat(list(unseen.values())))
    console.print(f"Of the variance of held-out states {part:.0%} is rebuilt by {sae.active} features.")
    feature = topic_feature(sae, states, options.topic)
    largest = sae.encode(states[options.topic])[:, feature].max().item()
    value = options.strength * largest
    before = word_chances(model, sae, options.layer, feature)
    after = word_chances(model, sae, options.layer, feature, value)
    table = Table(title=f"Feature {feature}, chosen for {options.topic}")
    for column in (
        "topic",
        "mean at held-out sentences",
        "log-probability of its words",
        f"set to {value:.0f}",
    ):
        table.add_column(column, justify="left" if column == "topic" else "right")
    for topic, held_out in unseen.items():
        mean = sae.encode(held_out)[:, feature].mean()
        table.add_row(topic, f"{mean:.2f}", f"{before[topic]:.2f}", f"{after[topic]:.2f}")
    console.print(table)
    with console.status("Writing"):
        baseline = write(model, sae, options.layer, feature, max_tokens=options.max_tokens)
        steered = write(model, sae, options.layer, feature, value=value, max_tokens=options.max_tokens)
    console.print(f"{PROMPT} …\n  baseline: {escape(baseline)}\n  steered: {escape(steered)}")


if __name__ == "__main__":
    main()
