"""Which positions of an invoke's rows are tokens, where shorter texts of a batch are filled up."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nnsight_engine import NNsight, save
from nnsight_engine.modeling.language import LanguageModel
from tests.families.checkpoints import write_checkpoint

SHORT, LONG = " the tower", " I love the tower of Paris"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    return LanguageModel(write_checkpoint("llama", tmp_path_factory.mktemp("llama")), dispatch=True)


def alone(model: LanguageModel, text: str) -> torch.Tensor:
    with model.trace(text):
        hidden = save(model.model.layers[0].output)
    row: torch.Tensor = hidden[0]
    return row


def test_the_tokens_of_each_row_are_found(model: LanguageModel) -> None:
    with model.trace() as tracer:
        masks, lengths, firsts, means = save([]), save([]), save([]), save([])
        for texts in ([SHORT], [LONG, SHORT], None):
            with tracer.invoke(*() if texts is None else (texts,)):
                hidden = model.model.layers[0].output
                mask = tracer.attention_mask
                masks.append(mask)
                lengths.append(tracer.lengths)
                firsts.append(hidden[range(len(hidden)), tracer.first_positions])
                means.append((hidden * mask[..., None]).sum(1) / tracer.lengths[:, None])
    short, long = alone(model, SHORT), alone(model, LONG)
    assert [tuple(mask.shape) for mask in masks] == [(1, len(long)), (2, len(long)), (3, len(long))]
    for at, rows in enumerate(([short], [long, short], [short, long, short])):
        assert lengths[at].tolist() == [len(row) for row in rows]
        for row, first, mean in zip(rows, firsts[at], means[at], strict=True):
            torch.testing.assert_close(first, row[0], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(mean, row.mean(0), rtol=1e-4, atol=1e-5)


def test_a_shape_error_of_a_short_text_mentions_padding(model: LanguageModel) -> None:
    own = alone(model, SHORT)[None]

    def run(value: torch.Tensor) -> None:
        with model.trace() as tracer:
            with tracer.invoke(SHORT):
                model.model.layers[0].output = value
            with tracer.invoke(LONG):
                _ = model.output

    with pytest.raises(ValueError, match=r"padded to the .* positions .* tracer\.first_positions"):
        run(own)
    with pytest.raises(ValueError, match="must be of shape") as caught:
        run(own[..., :3].repeat(1, 9, 1))
    assert "padded to" not in str(caught.value)


def test_generation_that_moves_filling_is_refused(model: LanguageModel) -> None:
    before = model.tokenizer.padding_side

    def lengths(run: Any = model.generate) -> list[int]:
        with run([SHORT, LONG], max_new_tokens=2) as tracer:
            found = save(tracer.lengths)
            _ = model.output
        return [int(one) for one in found]

    assert lengths() == [len(alone(model, SHORT)), len(alone(model, LONG))]
    model.tokenizer.padding_side = "right"
    try:
        for run in (model.generate, model.trace):
            with pytest.raises(ValueError, match="padding_side = 'left'"):
                lengths(run)
    finally:
        model.tokenizer.padding_side = before


def test_where_nothing_is_filled_up_it_says_so() -> None:
    model: Any = NNsight(torch.nn.Identity())

    def run() -> None:
        with model.trace(torch.ones(1, 2)) as tracer:
            _ = tracer.lengths

    with pytest.raises(ValueError, match="are for blocks of a running trace"):
        run()
