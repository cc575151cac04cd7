"""An invoke's own rows: which of their positions are tokens, and KV caches that hold no other rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from nnsight_engine import NNsight, save
from nnsight_engine.core.trees import tensors
from nnsight_engine.modeling.language import LanguageModel
from tests.families.checkpoints import write_checkpoint

FIRST, SECOND = " the tower of Paris", " I love the tower"
SHORT, LONG = " the tower", " I love the tower of Paris"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    return LanguageModel(write_checkpoint("llama", tmp_path_factory.mktemp("llama")), dispatch=True)


def keys_alone(model: LanguageModel, text: str) -> list[torch.Tensor]:
    with model.trace(text, use_cache=True):
        output = save(model.output)
    return [layer.keys for layer in output.past_key_values.layers]


def test_an_invoke_saves_the_cache_of_its_own_rows(model: LanguageModel) -> None:
    with model.trace(use_cache=True) as tracer:
        with tracer.invoke([FIRST, FIRST]):
            first = save(model.output)
        with tracer.invoke(SECOND):
            second = save(model.output)
        with tracer.invoke():
            whole = save(model.output)
    assert {len(layer.keys) for layer in whole.past_key_values.layers} == {3}
    for text, output, num_rows in ((FIRST, first, 2), (SECOND, second, 1)):
        assert output.past_key_values.get_seq_length() == whole.past_key_values.get_seq_length()
        for layer, alone in zip(output.past_key_values.layers, keys_alone(model, text), strict=True):
            assert len(layer.keys) == len(layer.values) == num_rows
            torch.testing.assert_close(layer.keys[:1, :, -alone.shape[2] :], alone, rtol=1e-4, atol=1e-5)


class CountingCache(DynamicCache):
    """Counts how often its layers are looked at from outside of the model's own use of it."""

    num_copies = 0

    def __copy__(self) -> CountingCache:
        type(self).num_copies += 1
        other = type(self)()
        other.__dict__.update(self.__dict__)
        return other


def test_a_traces_cache_leaves_kv_caches_out_and_takes_no_views_of_them(model: LanguageModel) -> None:
    num_bytes = []
    for num_steps in (4, 8):
        with model.generate(
            max_new_tokens=num_steps, min_new_tokens=num_steps, past_key_values=CountingCache()
        ) as tracer:
            with tracer.invoke(FIRST):
                kept = tracer.cache()
            with tracer.invoke(SECOND):
                _ = model.lm_head.output
        steps = kept.model.model.layers[1].inputs
        assert [named["past_key_values"] for _, named in steps] == [None] * num_steps
        later = [tensor for step in steps[1:] for tensor in tensors(step)]
        num_bytes.append(sum(one.nbytes for one in later) / (num_steps - 1))
    assert CountingCache.num_copies == 0
    assert num_bytes[0] == num_bytes[1], "what a step keeps grows with the steps before it"


def test_the_cache_in_a_layers_arguments_can_be_edited_in_place_and_nowhere_else(
    model: LanguageModel,
) -> None:
    def run(*, edits: bool) -> tuple[list[Any], list[Any]]:
        with model.generate(max_new_tokens=3) as tracer:
            first, second = save([]), save([])
            with tracer.invoke(FIRST):
                for step in tracer.iter[:]:
                    cache = model.model.layers[0].inputs[1]["past_key_values"]
                    if edits and step == 1:
                        cache.layers[1].values[:] = 0
                    first.append(model.lm_head.output[:, -1].clone())
            with tracer.invoke(SECOND):
                for _ in tracer.iter[:]:
                    second.append(model.lm_head.output[:, -1].clone())
        return first, second

    plain, edited = run(edits=False), run(edits=True)
    assert torch.equal(plain[0][0], edited[0][0])
    assert not torch.allclose(plain[0][1], edited[0][1])
    assert all(map(torch.equal, plain[1], edited[1]))


def test_a_cache_that_is_assigned_back_with_the_output_is_the_models_own(model: LanguageModel) -> None:
    with model.trace(use_cache=True) as tracer:
        with tracer.invoke(FIRST):
            output = model.output
            output.logits = torch.zeros_like(output.logits)
            model.output = output
        with tracer.invoke(SECOND):
            second = save(model.output.logits)
        with tracer.invoke():
            whole = save(tracer.result)
    assert not whole.logits[0].any()
    assert torch.equal(whole.logits[1:], second)
    assert {len(layer.keys) for layer in whole.past_key_values.layers} == {2}


def test_tensors_put_into_an_invokes_cache_are_refused(model: LanguageModel) -> None:
    def run() -> None:
        with model.trace(use_cache=True) as tracer:
            with tracer.invoke(FIRST):
                model.output.past_key_values.layers[0].keys = torch.zeros(1)
            with tracer.invoke(SECOND):
                _ = model.output

    with pytest.raises(ValueError, match="edit its tensors in place"):
        run()


# Where shorter texts of a batch are filled up.


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
