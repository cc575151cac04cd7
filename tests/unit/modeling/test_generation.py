"""Generation through a trace gives the tokens that transformers gives; each step can be read and edited."""

from __future__ import annotations

import pytest
import torch
from transformers import GenerationConfig

from nnsight_engine.core.saves import save
from tests.unit.modeling.conftest import LONG, SHORT, Pair

N = 4
EXACTLY = {"max_new_tokens": N, "min_new_tokens": N}


def test_tokens_of_several_invokes_are_as_if_alone(pair: Pair) -> None:
    model = pair.model
    with model.generate(**EXACTLY) as tracer:
        with tracer.invoke(SHORT):
            short = model.generator.output.save()
        with tracer.invoke([LONG, SHORT]):
            others = tracer.result.save()
        with tracer.invoke():
            every = tracer.result.save()
    assert short[:, -N:].tolist() == [pair.continuation(SHORT, N)]
    assert others[:, -N:].tolist() == [pair.continuation(LONG, N), pair.continuation(SHORT, N)]
    assert every.shape[0] == 3


def test_arguments_can_stand_on_the_first_invoke(gpt2: Pair) -> None:
    with gpt2.model.generate() as tracer:
        with tracer.invoke(SHORT, **EXACTLY):
            first = tracer.result.save()
        with tracer.invoke(LONG):
            pass
    assert first[0, -N:].tolist() == gpt2.continuation(SHORT, N)


def test_a_custom_streamer_receives_the_prompt_too(gpt2: Pair) -> None:
    class Streamer:
        heard: list[torch.Tensor] = []  # noqa: RUF012 - one instance
        ended = False

        def put(self, value: torch.Tensor) -> None:
            self.heard.append(value)

        def end(self) -> None:
            self.ended = True

    own = Streamer()
    with gpt2.model.generate(LONG, streamer=own, **EXACTLY):
        first = gpt2.model.generator.streamer.output.save()
    assert own.ended
    assert own.heard[0].shape == gpt2.tokenizer(LONG, return_tensors="pt")["input_ids"].shape
    assert torch.equal(own.heard[1], first)


def test_what_replaces_the_generators_output_is_the_result(gpt2: Pair) -> None:
    with gpt2.model.generate(LONG, **EXACTLY) as tracer:
        gpt2.model.generator.output = torch.zeros(1, 1)
        result = tracer.result.save()
    assert result.tolist() == [[0]]


def test_a_call_without_with_takes_any_input_and_runs_at_once(pair: Pair) -> None:
    expected = pair.continuation(SHORT, N)
    assert pair.model.generate(SHORT, **EXACTLY)[0, -N:].tolist() == expected
    assert pair.model.generate([SHORT, LONG], **EXACTLY)[0, -N:].tolist() == expected
    ids = pair.tokenizer(SHORT, return_tensors="pt")["input_ids"]
    assert pair.model.generate(inputs=ids, **EXACTLY)[0, -N:].tolist() == expected


def test_beam_search_has_no_stream_and_gives_the_beams_of_transformers(gpt2: Pair) -> None:
    with gpt2.model.generate(LONG, num_beams=3, **EXACTLY) as tracer:
        result = tracer.result.save()
    encoded = gpt2.tokenizer(LONG, return_tensors="pt")
    assert torch.equal(result, gpt2.plain.generate(**encoded, num_beams=3, **EXACTLY))


@pytest.mark.parametrize("arguments", [{"num_beams": 3}, {"num_beams": 3, "num_return_sequences": 2}])
def test_each_invoke_sees_what_becomes_of_its_own_rows(gpt2: Pair, arguments: dict[str, int]) -> None:
    model = gpt2.model
    with model.generate(**arguments, **EXACTLY) as tracer:
        with tracer.invoke(SHORT):
            first = tracer.result.save()
        with tracer.invoke([LONG, LONG]):
            beams = model.lm_head.output.save()
            second = tracer.result.save()
    num_sequences = arguments.get("num_return_sequences", 1)
    assert (len(first), len(second), len(beams)) == (num_sequences, 2 * num_sequences, 2 * 3)
    encoded = gpt2.tokenizer(LONG, return_tensors="pt")
    alone = gpt2.plain.generate(**encoded, **arguments, **EXACTLY)
    assert second[:num_sequences, -N:].tolist() == alone[:, -N:].tolist()


def test_beams_of_a_generation_config_count_too(gpt2: Pair) -> None:
    config = GenerationConfig(num_beams=2, max_new_tokens=2)
    with gpt2.model.generate(LONG, generation_config=config) as tracer:
        result = tracer.result.save()
    assert result.shape[0] == 1


def test_scores_come_with_the_result_when_asked_for(gpt2: Pair) -> None:
    with gpt2.model.generate(LONG, return_dict_in_generate=True, output_scores=True, **EXACTLY) as tracer:
        result = tracer.result.save()
    assert len(result.scores) == N


def test_a_compiled_cache_is_not_compiled_under_a_trace(gpt2: Pair) -> None:
    with gpt2.model.generate(LONG, cache_implementation="static", **EXACTLY) as tracer:
        tokens = save([gpt2.model.lm_head.output[0, -1].argmax().item() for _ in tracer.iter[:]])
    assert tokens == gpt2.continuation(LONG, N)
    assert not hasattr(gpt2.model._module, "_compiled_call")
