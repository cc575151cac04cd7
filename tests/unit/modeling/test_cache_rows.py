"""KV caches that an invoke is given hold its own rows, for reading, saving and editing in place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from nnsight_engine import save
from nnsight_engine.core.trees import tensors
from nnsight_engine.modeling.language import LanguageModel
from tests.families.checkpoints import write_checkpoint

FIRST, SECOND = " the tower of Paris", " I love the tower"


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
