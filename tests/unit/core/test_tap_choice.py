"""Which taps an operator's words mean."""

from __future__ import annotations

import pytest

from nnsight_engine.core.errors import UnsupportedOptionError
from nnsight_engine.core.operator_choices import check_taps, chosen_taps


@pytest.mark.parametrize(
    ("text", "taps"),
    [
        ("all", {0, 1, 2, 3, 4}),
        ("off", set()),
        ("layers.1:3.output", {2, 3}),
        ("layers.1.input, layers.-1.output", {1, 4}),
        ("embed.output,layers.*.output", {0, 1, 2, 3, 4}),
    ],
)
def test_words_become_taps(text: str, taps: set[int]) -> None:
    check_taps(text)
    assert chosen_taps(text, 4) == taps


@pytest.mark.parametrize("text", ["", "some", "layers.3.mlp.output", "logits", "layers.x.output", "all,off"])
def test_what_names_no_taps_is_refused_before_a_model_is_loaded(text: str) -> None:
    with pytest.raises(UnsupportedOptionError, match="--taps"):
        check_taps(text)


def test_a_layer_that_the_model_lacks_is_refused() -> None:
    with pytest.raises(UnsupportedOptionError, match="between -4 and 3"):
        chosen_taps("layers.9.output", 4)
