"""The autoencoder on the server: stored, read, steered by."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from examples.sae_on_server.client import Server

READ: Final = "The captain paid 250 dollars for the ship, and the crew sailed out of the harbour in 1987."
PROMPTS: Final = (
    "When I woke up this morning, I thought about",
    "The best thing about my life is",
    "Yesterday my friend told me",
    "She opened the letter and read:",
)
FILES: Final = {"weights": "sae_weights.safetensors", "cfg": "cfg.json"}


def upload(server: Server, name: str, folder: Path, labels: dict[int, str]) -> str:
    """Store the autoencoder of a folder with labels; return its name and version, ``topics@1``."""
    files = {part: (folder / file).read_bytes() for part, file in FILES.items()}
    stored = server.send("POST", "/v1/dictionaries", data={"name": name}, files=files)
    server.send(
        "PUT", f"/v1/dictionaries/{stored['id']}/labels", json={str(one): labels[one] for one in labels}
    )
    return f"{stored['name']}@{stored['version']}"


@dataclasses.dataclass(frozen=True, slots=True)
class Reading:
    """A text by its features.

    Attributes:
        tokens: The text of each token but the first.
        features: The most active features of each, the strongest first: id, label (None without one),
            activation.
    """

    tokens: list[str]
    features: list[list[tuple[int, str | None, float]]]

    def rows(self, num_rows: int) -> tuple[list[str], npt.NDArray[np.float64]]:
        """Return labels of the labelled features with the largest activations, and ``[rows, tokens]``."""
        largest: dict[tuple[int, str], float] = {}
        for found in self.features:
            for one, text, value in found:
                if text is not None:
                    largest[one, text] = max(value, largest.get((one, text), 0.0))
        chosen = sorted(largest, key=lambda key: largest[key], reverse=True)[:num_rows]
        values = np.zeros((len(chosen), len(self.tokens)))
        for column, found in enumerate(self.features):
            by_id = {one: value for one, _, value in found}
            values[:, column] = [by_id.get(one, 0.0) for one, _ in chosen]
        return [text for _, text in chosen], values


def read(server: Server, dictionary: str, text: str) -> Reading:
    """Return the features that are most active at each token of a text but the first."""
    operation = {
        "op": "features",
        "dictionary": dictionary,
        "top_k": 32,
        "where": {"phase": "prompt", "exclude": {"positions": [0]}},
        "name": "features",
    }
    (choice,) = server.complete([text], [operation], max_tokens=1)
    result = choice["interventions"]["results"]["features"]
    tokens = server.send("POST", "/v1/tokenize", json={"prompt": text})["tokens"]
    return Reading(
        [tokens[position]["text"] for position in result["positions"]],
        [[(one["id"], one["label"], one["activation"]) for one in found] for found in result["features"]],
    )


def continuations(
    server: Server, dictionary: str, feature: int | str, value: float | None, *, samples: int, max_tokens: int
) -> list[str]:
    """Return texts that go on from the prompts, ``samples`` of each.

    The feature is set to the value at each token but the first; it is left as it is if that is None.
    """
    operation = {
        "op": "feature",
        "dictionary": dictionary,
        "changes": [{"feature": feature, "mode": "set", "value": value}],
        "where": {"exclude": {"positions": [0]}},
    }
    operations = [] if value is None else [operation]
    choices = server.complete(PROMPTS, operations, n=samples, max_tokens=max_tokens, temperature=0.8, seed=0)
    return [choice["text"] for choice in choices]


def share(texts: Sequence[str], words: set[str]) -> float:
    """Return which part of the words of texts are among the given ones."""
    found = re.findall(r"[a-z]+", " ".join(texts).lower())
    return sum(word in words for word in found) / max(1, len(found))
