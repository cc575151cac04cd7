"""Labels of features, by rules about the contexts in which they are most active."""

from __future__ import annotations

import collections
import re
from collections.abc import Mapping, Sequence
from typing import Final

import torch

from examples.sae_on_server.corpus import Corpus

TOP: Final = 20
"""Contexts that a label is decided by."""
MOST: Final = 0.8
"""The part of them that a rule must hold for."""
KINDS: Final = {
    "blanks": r"",
    "numbers": r".*[0-9].*",
    "line breaks": r".*\n.*",
    "ends of sentences": r"[.!?]+",
    "commas": r",",
    "quotation marks": r"[.,!?]?\"[.,!?]?",
    "apostrophes": r"'(s|t|m|re|ve|d|ll)?",
}
"""Rules about a token's text without the blanks around it."""


def top_contexts(active: torch.Tensor, feature: int) -> list[int]:
    """Return the tokens at which a feature is most active, the most active first, without inactive ones."""
    values, found = active[:, feature].topk(min(TOP, len(active)))
    return [int(one) for one in found[values > 0]]


def label(corpus: Corpus, best: Sequence[int]) -> str | None:
    """Return a label for a feature by its top contexts, or None if no rule holds for most of them.

    The first rule that holds decides: a kind of token, one word, a topic. A topic must be that of several
    texts.
    """
    if len(best) < TOP or len({corpus.texts[one] for one in best}) < TOP // 4:
        return None
    texts = [corpus.tokens[one] for one in best]
    words = [text.strip(" ").lower() for text in texts]
    needed = MOST * len(best)
    common = ", ".join(word for word, _ in collections.Counter(filter(None, words)).most_common(3))
    for kind, pattern in KINDS.items():
        if sum(re.fullmatch(pattern, word, re.DOTALL) is not None for word in words) >= needed:
            return ": ".join(filter(None, (kind, repr(common) if kind == "line breaks" else common)))
    word, count = collections.Counter(words).most_common(1)[0]
    if count >= needed:
        return f"the word “{word}”"
    topic, count = collections.Counter(corpus.topic(one) for one in best).most_common(1)[0]
    return f"{topic}: {common}" if count >= needed else None


def label_features(corpus: Corpus, active: torch.Tensor) -> dict[int, str]:
    """Return labels of features for which a rule holds; of two with one label, the more frequent has it."""
    labels: dict[int, str] = {}
    for feature in (active > 0).sum(0).argsort(descending=True).tolist():
        found = label(corpus, top_contexts(active, feature))
        if found is not None and found not in labels.values():
            labels[feature] = found
    return labels


def topic_feature(corpus: Corpus, active: torch.Tensor, topic: str, labels: Mapping[int, str]) -> int:
    """Return the feature whose mean activation in a topic's texts exceeds that in the others most.

    It is one of those with a label of the topic, rather than of a word, if there are any.
    """
    of_topic = torch.tensor([corpus.topics[text] == topic for text in corpus.texts])
    excess = active[of_topic].mean(0) - active[~of_topic].mean(0)
    named = [feature for feature, text in labels.items() if text.startswith(f"{topic}: ")]
    return max(named or range(len(excess)), key=lambda feature: float(excess[feature]))


def vocabulary(corpus: Corpus, topic: str, num_words: int = 15) -> set[str]:
    """Return the words that are most characteristic of a topic's texts, whatever the features are."""
    counts = {True: collections.Counter[str](), False: collections.Counter[str]()}
    for word, text in zip(corpus.tokens, corpus.texts, strict=True):
        if re.fullmatch(r" [a-z]{3,}", word):
            counts[corpus.topics[text] == topic][word.strip()] += 1
    inside, outside = counts[True], counts[False]
    often = [word for word, count in inside.items() if count >= 3]
    return set(sorted(often, key=lambda word: inside[word] / (outside[word] + 3), reverse=True)[:num_words])
