"""Makes the examples that come with the bundled model, and measures them.

Both need a running server of the bundled model. ``make`` is for one without the examples of an earlier run,
``NNSIGHT_ENGINE_EXAMPLES=0 make serve``; it writes ``app/examples/data``, in about an hour of one core, most
of it for the texts of the dictionary. ``describe`` writes what the playground shows of the dictionary's
features, and removes labels that do not hold in other texts. ``measure`` prints the numbers of
``docs/bundled-examples.md``.

    python -m scripts.bundled_examples make --folder /tmp/sae
    python -m scripts.bundled_examples describe --folder /tmp/described
    python -m scripts.bundled_examples measure
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.sae_on_server.__main__ import HELD_OUT_EVERY
from examples.sae_on_server.autoencoder import SparseAutoencoder, activations, quality, train, write
from examples.sae_on_server.client import Server
from examples.sae_on_server.corpus import TOPICS, Corpus, collect
from examples.sae_on_server.labels import KINDS, MOST, label_features, top_contexts, topic_feature
from examples.sae_on_server.use import continuations, share
from nnsight_engine import bundled_model_path
from scripts import example_prompts as prompts

ROOT: Final = Path(__file__).resolve().parents[1]
DATA: Final = ROOT / "app/examples/data"
DESCRIPTIONS: Final = ROOT / "app/playground/src/data/example-topics.json"
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
DESCRIBED_TEXTS: Final = 288
"""Texts that features are looked for in, and labels judged by."""
EXAMPLES: Final = 3
UNPLEASANT: Final = re.compile(
    r"\b(kill|murder|manslaughter|nazi|suicid|sex|terror|slave|blood|abus|victim|die[ds]?\b|death|dead\b|weapon)"
    "|nazi",
    re.IGNORECASE,
)
"""Texts that are no examples: the model writes anything at temperature 0.8."""
EFFECTS: Final = 6
EFFECTS_AT_ONCE: Final = 64
LIKELY: Final = float(np.log(0.0005))
"""Least log-probability of a token that is named as an effect."""
SHOWN_BY: Final = 10
"""Contexts in which a label has to hold."""
SEEN: Final = ("law", "school", "weather")
"""Labels that hold, by reading: the words are of the topic in texts about others."""
AROUND: Final = 8
"""Tokens before the token of an example, and as many after it."""
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


def describe(server: Server, folder: Path) -> None:
    """Write examples and logit effects of the dictionary's features; remove labels that do not hold."""
    folder.mkdir(parents=True, exist_ok=True)
    source = {"layer": LAYER, "texts": DESCRIBED_TEXTS, "text_tokens": TEXT_TOKENS}
    corpus = Corpus.load(folder, source)
    if corpus is None:
        corpus = collect(server, LAYER, DESCRIBED_TEXTS, TEXT_TOKENS)
        corpus.save(folder, source)
    file = DATA / f"{DICTIONARY}.safetensors"
    sae = SparseAutoencoder(corpus.states, NUM_FEATURES, ACTIVE)
    sae.load_state_dict({name: value.float() for name, value in load_file(file).items()})
    active = activations(sae.requires_grad_(requires_grad=False), corpus.states)
    effects = _effects(sae, active.amax(0))
    index = json.loads((DATA / "index.json").read_text(encoding="utf-8"))
    labels = index["dictionaries"][0]["labels"]
    features = {}
    for feature, (promotes, suppresses) in enumerate(effects):
        best = top_contexts(active, feature)[:SHOWN_BY]
        label = labels.get(str(feature))
        if label is not None and label not in SEEN and not _holds(label, corpus, best):
            print(feature, label, [corpus.tokens[one] for one in best])
            del labels[str(feature)]
        examples = [[*_around(corpus, one), round(float(active[one, feature]), 1)] for one in best]
        features[feature] = {
            "examples": [one for one in examples if not UNPLEASANT.search("".join(one[:3]))][:EXAMPLES],
            "promotes": promotes,
            "suppresses": suppresses,
        }
    description_of = {"sha256": hashlib.sha256(file.read_bytes()).hexdigest(), "features": features}
    DESCRIPTIONS.parent.mkdir(exist_ok=True)
    DESCRIPTIONS.write_text(
        json.dumps(description_of, ensure_ascii=False, separators=(",", ":")), encoding="utf-8"
    )
    (DATA / "index.json").write_text(json.dumps(index, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _effects(sae: SparseAutoencoder, sizes: torch.Tensor) -> list[tuple[list[str], list[str]]]:
    """Return the tokens that each feature makes more and less likely.

    Its direction, as long as its activations are at most, is added at the last token of some beginnings.
    """
    path = bundled_model_path()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(path)
    changes = torch.cat([torch.zeros_like(sae.W_dec[:1]), sae.W_dec * sizes[:, None]])
    starts = [torch.tensor(tokenizer.encode(start)) for start in prompts.STARTS]
    means = torch.stack([_next_logprobs(model, start, changes) for start in starts]).mean(0)
    before, after = means[:1], means[1:]
    found = []
    for sign, likely in ((1, after), (-1, before.expand_as(after))):
        ranked = (sign * (after - before)).masked_fill(likely < LIKELY, -torch.inf).topk(EFFECTS)
        found.append([tokenizer.batch_decode(tokens[:, None]) for tokens in ranked.indices])
    return list(zip(*found, strict=True))


def _next_logprobs(model: Any, ids: torch.Tensor, changes: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities of the next token, with each change added at the last one."""
    found = []
    for part in changes.split(EFFECTS_AT_ONCE):
        hook = model.model.layers[LAYER].register_forward_hook(
            lambda _, __, output, part=part: output.index_add(1, torch.tensor([len(ids) - 1]), part[:, None])
        )
        with torch.no_grad():
            logits = model(ids.expand(len(part), -1), logits_to_keep=1).logits[:, -1]
        hook.remove()
        found.append(logits.log_softmax(-1))
    return torch.cat(found)


def _holds(label: str, corpus: Corpus, best: Sequence[int]) -> bool:
    """Return whether most of a feature's top contexts are as its label says."""
    kind, _, _ = label.partition(": ")
    word = re.fullmatch("the word “(.*)”", label)
    texts = [corpus.tokens[one].strip(" ").lower() for one in best]
    if word:
        fits = [text == word[1] for text in texts]
    elif kind in KINDS:
        fits = [re.fullmatch(KINDS[kind], text, re.DOTALL) is not None for text in texts]
    else:
        fits = [corpus.topic(one) == kind for one in best]
    return bool(best) and sum(fits) >= MOST * len(best)


def _around(corpus: Corpus, index: int) -> tuple[str, str, str]:
    """Return a token between the texts before and after it."""
    near = [
        one
        for one in range(max(0, index - AROUND), min(len(corpus.tokens), index + AROUND + 1))
        if corpus.texts[one] == corpus.texts[index]
    ]
    before = "".join(corpus.tokens[one] for one in near if one < index)
    return before, corpus.tokens[index], "".join(corpus.tokens[one] for one in near if one > index)


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
    parser = argparse.ArgumentParser(description="Make, describe or measure the bundled examples.")
    parser.add_argument("action", choices=("make", "describe", "measure"))
    parser.add_argument("--base-url", default="http://127.0.0.1:8000", help="default: %(default)s")
    parser.add_argument("--folder", type=Path, default=Path("sae"), help="for states and texts")
    options = parser.parse_args()
    with Server(options.base_url) as server:
        if options.action == "make":
            make(server, options.folder)
        elif options.action == "describe":
            describe(server, options.folder)
        else:
            measure(server)


if __name__ == "__main__":
    main()
