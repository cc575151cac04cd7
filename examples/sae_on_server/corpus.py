"""Texts that the server writes, and the residual stream at their tokens."""

from __future__ import annotations

import base64
import dataclasses
import json
from pathlib import Path
from typing import Any, Final

import torch
from rich.progress import track
from safetensors.torch import load_file, save_file

from examples.sae_on_server.client import Server

TOPICS: Final = {
    "sea": ("ship", "harbour", "whale", "sailor"),
    "money": ("bank", "loan", "tax", "salary"),
    "kitchen": ("soup", "oven", "bread", "recipe"),
    "space": ("planet", "rocket", "astronaut", "moon"),
    "health": ("doctor", "hospital", "medicine", "fever"),
    "music": ("piano", "song", "orchestra", "guitar"),
    "sport": ("football", "goalkeeper", "race", "team"),
    "school": ("teacher", "exam", "pupil", "lesson"),
    "law": ("judge", "court", "lawyer", "thief"),
    "farm": ("cow", "field", "harvest", "tractor"),
    "travel": ("train", "airport", "hotel", "passport"),
    "weather": ("snow", "thunder", "rain", "wind"),
}
FORMS: Final = (
    "Dear diary, today I spent hours thinking about the {word}.",
    '"Have you ever heard of the {word}?" she asked.',
    "The newspaper reported on Tuesday that the {word}",
    "Here are 5 facts about the {word}:\n\n1.",
    "In 1987, everything that had to do with the {word} cost $250, and",
    "What is the {word}? The {word} is",
    "To prepare for the {word}, you should first",
    "The story of the {word} is old. Nobody",
    "Dear Mr. Brown, thank you for your letter about the {word}. Unfortunately,",
    "My grandmother used to say that the {word}",
    "If there were no {word}, then",
    "He was running towards the {word}, and",
)
BATCH: Final = 48
"""Texts of one request."""


@dataclasses.dataclass(frozen=True, slots=True)
class Corpus:
    """Tokens of all texts one after another, without the first token of each.

    The state at a text's first token is many times longer than others, whatever the text says.

    Attributes:
        states: ``[tokens, width]``, float32.
        tokens: The text of each token.
        texts: The number of the text that it is in.
        topics: The topic of each text.
    """

    states: torch.Tensor
    tokens: list[str]
    texts: list[int]
    topics: list[str]

    def context(self, index: int, before: int = 8) -> str:
        """Return a token with those before it in its text."""
        start = index
        while start > 0 and index - start < before and self.texts[start - 1] == self.texts[index]:
            start -= 1
        return "".join(self.tokens[start : index + 1])

    def topic(self, index: int) -> str:
        """Return the topic of a token's text."""
        return self.topics[self.texts[index]]

    def save(self, folder: Path, source: dict[str, Any]) -> None:
        """Write it to a folder, with what it was made of."""
        save_file({"states": self.states.half()}, folder / "states.safetensors")
        others = {"tokens": self.tokens, "texts": self.texts, "topics": self.topics, "source": source}
        (folder / "texts.json").write_text(json.dumps(others), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path, source: dict[str, Any]) -> Corpus | None:
        """Return what ``save`` wrote, or None if there is nothing of this source."""
        if not (folder / "texts.json").exists():
            return None
        others = json.loads((folder / "texts.json").read_text(encoding="utf-8"))
        if others.pop("source") != source:
            return None
        return cls(load_file(folder / "states.safetensors")["states"].float(), **others)


def openings(num_texts: int) -> list[tuple[str, str]]:
    """Return topics, each with the beginning of a text about it; the first 576 are different."""
    topics = list(TOPICS.items())
    chosen = []
    for index in range(num_texts):
        turn, place = divmod(index, len(topics))
        topic, words = topics[place]
        word, form = words[turn % len(words)], FORMS[(turn // len(words) + 3 * turn) % len(FORMS)]
        chosen.append((topic, form.format(word=word)))
    return chosen


def collect(server: Server, layer: int, num_texts: int, max_tokens: int) -> Corpus:
    """Have the server write texts, and capture the residual stream after a layer meanwhile."""
    point = f"layers.{layer}.output"
    capture = {
        "op": "capture",
        "at": point,
        "dtype": "float32",
        "where": {"exclude": {"positions": [0]}},
        "name": "stream",
    }
    states: list[torch.Tensor] = []
    tokens: list[str] = []
    texts: list[int] = []
    chosen = openings(num_texts)
    for start in track(range(0, num_texts, BATCH), description="Writing texts"):
        prompts = [text for _, text in chosen[start : start + BATCH]]
        written = server.complete(
            prompts, [capture], max_tokens=max_tokens, temperature=0.8, seed=start, return_token_ids=True
        )
        for number, choice in enumerate(written, start):
            stream = choice["interventions"]["results"]["stream"]
            ids = choice["prompt_token_ids"] + choice["token_ids"]
            listed = server.send("POST", "/v1/tokenize", json={"prompt": ids})["tokens"]
            states.append(tensor(stream["points"][point]))
            tokens += [listed[position]["text"] for position in stream["positions"]]
            texts += [number] * len(stream["positions"])
    return Corpus(torch.cat(states), tokens, texts, [topic for topic, _ in chosen])


def tensor(sent: dict[str, Any]) -> torch.Tensor:
    """Return a float32 tensor object of an answer as a tensor."""
    return torch.frombuffer(bytearray(base64.b64decode(sent["data"])), dtype=torch.float32).reshape(
        sent["shape"]
    )
