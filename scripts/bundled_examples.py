"""Makes the examples that come with the bundled model, and measures them.

Both need a running server of the bundled model. ``make`` is for one without the examples of an earlier run,
``NNSIGHT_ENGINE_EXAMPLES=0 make serve``; it writes ``app/examples/data``, in about an hour of one core, most
of it for the texts of the dictionary. ``measure`` prints the numbers of ``docs/bundled-examples.md``.

    python -m scripts.bundled_examples make --folder /tmp/sae
    python -m scripts.bundled_examples measure
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import torch

from examples.sae_on_server.__main__ import HELD_OUT_EVERY
from examples.sae_on_server.autoencoder import activations, quality, train, write
from examples.sae_on_server.client import Server
from examples.sae_on_server.corpus import TOPICS, Corpus, collect
from examples.sae_on_server.labels import label_features, topic_feature
from examples.sae_on_server.use import continuations, share
from scripts import example_prompts as prompts

DATA: Final = Path(__file__).resolve().parents[1] / "app/examples/data"
VECTORS: Final = {"example-joy": prompts.JOY, "example-formal": prompts.FORMAL}
DETECTOR: Final = "example-question"
DETECTOR_LAYER: Final = 14
DICTIONARY: Final = "example-topics"
LAYER: Final = 15
NUM_TEXTS: Final = 1152
TEXT_TOKENS: Final = 80
NUM_FEATURES: Final = 1152
ACTIVE: Final = 24
STEPS: Final = 2500
STEER_AT: Final = "layers.12.output"
SET_TO: Final = (30.0, 60.0)


def make(server: Server, folder: Path) -> None:
    """Make all examples anew."""
    folder.mkdir(parents=True, exist_ok=True)
    DATA.mkdir(exist_ok=True)
    index: dict[str, Any] = {"vectors": [], "detectors": [], "dictionaries": []}
    for name, pairs in VECTORS.items():
        made = server.send("POST", "/v1/vectors/train", json={**_sides(name, pairs), "position": "mean"})
        _download(server, f"/v1/vectors/{made['id']}/content", name)
        index["vectors"].append({"name": name, "training": made["training"]})
    body = {**_sides(DETECTOR, prompts.QUESTIONS), "layers": [DETECTOR_LAYER]}
    made = server.send("POST", "/v1/detectors/train", json=body)
    _download(server, f"/v1/detectors/{made['id']}/content", DETECTOR)
    index["detectors"].append({"name": DETECTOR, "training": made["training"]})
    cfg, labels = make_dictionary(server, folder)
    index["dictionaries"].append({"name": DICTIONARY, "cfg": cfg, "labels": labels})
    (DATA / "index.json").write_text(json.dumps(index, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def make_dictionary(server: Server, folder: Path) -> tuple[dict[str, Any], dict[int, str]]:
    """Train the dictionary and write its weights; return its cfg and its labels."""
    source = {"layer": LAYER, "texts": NUM_TEXTS, "text_tokens": TEXT_TOKENS}
    corpus = Corpus.load(folder, source)
    if corpus is None:
        corpus = collect(server, LAYER, NUM_TEXTS, TEXT_TOKENS)
        corpus.save(folder, source)
    held_out = torch.tensor(corpus.texts) % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
    sae, _ = train(corpus.states[~held_out], num_features=NUM_FEATURES, k=ACTIVE, steps=STEPS)
    print(len(corpus.tokens), quality(sae, corpus.states[held_out]))
    write(sae, folder, LAYER, "HuggingFaceTB/SmolLM2-135M-Instruct")
    active = activations(sae, corpus.states)
    labels = label_features(corpus, active)
    for topic in TOPICS:
        labels[topic_feature(corpus, active, topic, labels)] = topic
    (DATA / f"{DICTIONARY}.safetensors").write_bytes((folder / "sae_weights.safetensors").read_bytes())
    return json.loads((folder / "cfg.json").read_text(encoding="utf-8")), dict(sorted(labels.items()))


def measure(server: Server) -> None:
    """Print how far the vectors steer, and how well the detector does at sentences that it has not seen."""
    print(f"{DETECTOR}: {_detector_report(server)}")
    print("share of joyful words, of casual words, of words with an apostrophe; letters of a word")
    print(f"not steered: {_style(_written(server, None, 0.0))}")
    for name in VECTORS:
        for scale in (0.3, -0.3):
            print(f"{name} {scale:+}: {_style(_written(server, name, scale))}")
    print("share of a topic's words: not changed; with its feature set to values")
    plain = continuations(server, DICTIONARY, 0, None, samples=8, max_tokens=32)
    for topic, listed in prompts.TOPIC_WORDS.items():
        words = set(listed.split())
        shares = [
            share(continuations(server, DICTIONARY, topic, value, samples=8, max_tokens=32), words)
            for value in SET_TO
        ]
        print(f"{topic}: {share(plain, words):.1%}; {', '.join(f'{one:.1%}' for one in shares)}")


def _sides(name: str, pairs: Sequence[tuple[str, str]]) -> dict[str, Any]:
    return {"name": name, "positive": [one for one, _ in pairs], "negative": [one for _, one in pairs]}


def _download(server: Server, path: str, name: str) -> None:
    response = httpx.get(f"{server.base_url}{path}", timeout=60)
    (DATA / f"{name}.safetensors").write_bytes(response.raise_for_status().content)


def _detector_report(server: Server) -> str:
    threshold = server.send("GET", "/v1/detectors", params={"name": DETECTOR})["data"][0]["threshold"]
    detect = {"op": "detect", "detector": DETECTOR, "where": {"positions": [-1]}, "name": "score"}
    yes, no = (
        np.array(
            [
                choice["interventions"]["results"]["score"]["scores"][0]
                for choice in server.complete(texts, [detect], max_tokens=1)
            ]
        )
        for texts in (prompts.UNSEEN_QUESTIONS, prompts.UNSEEN_STATEMENTS)
    )
    auroc = (yes[:, None] > no).mean()
    found, false = (yes >= threshold).mean(), (no >= threshold).mean()
    return (
        f"AUROC {auroc:.3f}; at {threshold:.2f} {found:.0%} of the questions, {false:.0%} of the statements"
    )


def _written(server: Server, vector: str | None, scale: float) -> list[str]:
    steer = {
        "op": "steer",
        "at": STEER_AT,
        "vector": {"name": vector},
        "mode": "norm_match",
        "scale": scale,
        "where": {"exclude": {"positions": [0]}},
    }
    operations = [] if vector is None else [steer]
    choices = server.complete(prompts.STARTS, operations, n=8, max_tokens=40, temperature=0.8, seed=1)
    return [choice["text"] for choice in choices]


def _style(texts: Sequence[str]) -> str:
    words = re.findall(r"[a-z']+", " ".join(texts).lower())
    parts = [share(texts, set(one.split())) for one in (prompts.JOYFUL_WORDS, prompts.CASUAL_WORDS)]
    parts.append(sum("'" in word for word in words) / len(words))
    return f"{', '.join(f'{part:.1%}' for part in parts)}; {sum(map(len, words)) / len(words):.1f}"


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description="Make or measure the examples of the bundled model.")
    parser.add_argument("action", choices=("make", "measure"))
    parser.add_argument("--base-url", default="http://127.0.0.1:8000", help="default: %(default)s")
    parser.add_argument("--folder", type=Path, default=Path("sae"), help="for states and texts")
    options = parser.parse_args()
    with Server(options.base_url) as server:
        if options.action == "make":
            make(server, options.folder)
        else:
            measure(server)


if __name__ == "__main__":
    main()
