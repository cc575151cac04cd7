"""Caches, scans, edits, names and classes of one's own in the serving engine, beside transformers' values."""

# mypy: disable-error-code="no-redef"

from __future__ import annotations

import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaMLP as LocalMLP
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.model_executor.models.llama import LlamaMLP

from nnsight_engine import Envoy, LanguageModel, eproperty, save
from nnsight_engine.envoys.hooks import requires_output
from nnsight_engine.interleaving.events import MissedProviderError
from nnsight_engine.modeling import vllm as modeling_vllm
from nnsight_engine.tracing.errors import WithBlockNotFoundError
from nnsight_engine.vllm_backend.compat import EngineLimits
from nnsight_engine.vllm_backend.request_tracer import Purpose, SentTrace
from nnsight_engine.vllm_backend.traces.errors import (
    ChunkedPromptError,
    EditLimitError,
    TraceBytesError,
)
from nnsight_engine.vllm_backend.traces.names import Names
from nnsight_engine.vllm_backend.vllm import VLLM
from tests.e2e.traces import HeldTracer, Plain, run_together, traced_engine
from tests.families.checkpoints import write_checkpoint

pytestmark = pytest.mark.e2e

PROMPT = "I think dogs are good"
OTHER = "I love the tower of Rome"
LONG = " the dogs of Paris hate cats and" * 12
GREEDY: dict[str, Any] = {"temperature": 0.0}
RENAME: dict[str, Any] = {
    "model.layers": "blocks",
    "mlp": ["ff", "feed"],
    "layers": "stages",
    "attn": "attention",
}
DIRECTION = torch.randn(128, generator=torch.Generator().manual_seed(0))


class HalfEnvoy(Envoy):
    """Stands for an MLP, and gives half of what that returns."""

    @eproperty(key="output")
    @requires_output
    def half(self) -> Any:
        """Half of the output."""

    @half.preprocess
    def half(self, value: torch.Tensor) -> torch.Tensor:
        return value * 0.5

    @half.transform
    def half(value: torch.Tensor) -> torch.Tensor:  # noqa: N805 - the documented form
        return value * 2


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a tiny model."""
    return write_checkpoint("llama", tmp_path_factory.mktemp("features") / "llama")


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Iterator[VLLM]:
    """Start an engine with steps of 64 tokens and memory for 24 blocks of 32."""
    options: dict[str, Any] = {
        "rename": RENAME,
        "envoys": {LlamaMLP: HalfEnvoy, "embed_tokens": HalfEnvoy},
        "max_model_len": 256,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 16,
        "block_size": 32,
        "num_gpu_blocks_override": 24,
        "limits": EngineLimits(trace_step_s=1.0, max_trace_bytes=4_000_000, max_edits=3),
    }
    with traced_engine(checkpoint, **options) as model:
        yield model


@pytest.fixture(scope="module")
def local(checkpoint: Path) -> LanguageModel:
    """Load the same model for transformers."""
    return LanguageModel(
        str(checkpoint),
        rename=RENAME,
        envoys={LocalMLP: HalfEnvoy, "embed_tokens": HalfEnvoy},
        dtype=torch.float32,
        attn_implementation="eager",
    )


@pytest.fixture(autouse=True)
def _no_edits(request: pytest.FixtureRequest) -> Iterator[None]:
    """Leave no edit behind."""
    yield
    if "model" in request.fixturenames:
        model: VLLM = request.getfixturevalue("model")
        model.clear_edits()
        for name in model.edits:
            model.remove_edit(name)


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Check that two engines agree; transformers' values have an axis more."""
    torch.testing.assert_close(ours, theirs.detach()[0], rtol=1e-3, atol=1e-3)


def plain_tokens(model: VLLM, prompt: str, max_tokens: int) -> list[int]:
    """Return what the engine generates by itself."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **GREEDY)
    (output,) = model.engine.generate([prompt], params, use_tqdm=False)
    return list(output.outputs[0].token_ids)


# Caches.


def test_a_cache_is_read_as_a_local_one_is(model: VLLM, local: LanguageModel) -> None:
    with model.trace(PROMPT, **GREEDY) as tracer:
        ours = tracer.cache(include_inputs=True)
        model.layers[1].mlp.output[:] *= 2
    with local.trace(PROMPT) as tracer:
        theirs = tracer.cache(include_inputs=True)
        local.layers[1].mlp.output[:] *= 2
    assert len(ours) > 40
    close(ours["model.model.layers.3.mlp"].output, theirs["model.model.layers.3.mlp"].output)
    close(ours.model.layers[1].output, theirs.model.layers[1].output)
    close(ours.model.layers[2].input, theirs.model.layers[2].input)
    close(ours.model.layers[0].attn.output, theirs.model.layers[0].attn.output[0])
    close(ours.model.stages[3].attention.output, theirs.model.stages[3].attention.output[0])
    close(ours.model.blocks[2].feed.output, theirs.model.blocks[2].feed.output)
    close(ours.model.layers[2].mlp.input, theirs.model.layers[2].mlp.input)
    close(ours.model.norm.output, theirs.model.norm.output)
    assert [type(value) for value in ours["model.model.layers.2"].output] == [torch.Tensor, torch.Tensor]
    below = ours.model.layers[3].keys()
    assert {path for path in below if path.endswith("mlp")} == {"model.model.layers.3.mlp"}
    assert len(ours.model.layers) == len(list(ours.model.layers))
    with pytest.raises(AttributeError, match="starts at 'model'"):
        _ = ours.transformer
    with pytest.raises(AttributeError, match=r"no value for model\.lm_head"):
        _ = ours.model.lm_head.output


def test_a_cache_of_a_generation_has_every_step(model: VLLM) -> None:
    with model.trace(PROMPT, max_tokens=3, ignore_eos=True, **GREEDY) as tracer:
        modules = [model.layers[2], model.layers[1].mlp, "model.samples", model.logits]
        cache = tracer.cache(modules=modules, dtype=torch.float16)
    num_tokens = len(model.tokenizer.encode(PROMPT))
    assert set(cache) == {"model.model.layers.2", "model.model.layers.1.mlp", "model.samples", "model.logits"}
    assert [len(rows) for rows in cache.model.layers[2].output] == [num_tokens, 1, 1]
    assert cache.model.layers[1].mlp.output[1].dtype is torch.float16
    assert [len(step.output) for step in cache.model.layers[2]] == [num_tokens, 1, 1]
    assert torch.equal(cache["model.samples"][2].output, cache["model.samples"].output[2])
    assert [int(token) for token in cache["model.samples"].output] == plain_tokens(model, PROMPT, 3)
    with pytest.raises(AttributeError, match="include_inputs=True"):
        _ = cache.model.layers[2].input


def test_caches_are_values_like_any_others(model: VLLM) -> None:
    with model.trace(**GREEDY) as tracer:
        with tracer.invoke(PROMPT):
            first = tracer.cache(modules=[model.layers[1]])
        with tracer.invoke(OTHER):
            kept = save({"part": tracer.cache(modules=model.layers[1:3]).model.layers[2]})
    num_first, num_second = (len(model.tokenizer.encode(text)) for text in (PROMPT, OTHER))
    assert first.model.layers[1].output.shape == (num_first, 128)
    assert kept["part"].output.shape == (num_second, 128)
    with model.trace(PROMPT, n=2, temperature=1.0, seed=3, max_tokens=2, ignore_eos=True) as tracer:
        several = tracer.cache(modules=["model.samples"])
    assert [len(one["model.samples"].output) for one in several] == [2, 2]
    with model.trace(PROMPT, **GREEDY) as tracer:
        model.layers[2].output
        late = tracer.cache()
        model.layers[3].output[:] += 1
    assert "model.model.layers.1" not in late
    assert "model.model.layers.3" in late
    assert len(late.model.layers[1]) == 0


def test_a_cache_has_whole_prompts_or_an_error(model: VLLM, local: LanguageModel) -> None:
    assert 64 < len(model.tokenizer.encode(LONG)) < 200
    with model.trace(LONG, max_tokens=2, ignore_eos=True, **GREEDY) as tracer:
        ours = tracer.cache(modules=[model.layers[2], model.layers[3].mlp, "model.logits"])
    with local.trace(LONG) as tracer:
        theirs = tracer.cache(modules=[local.layers[2], local.layers[3].mlp])
    close(ours.model.layers[2].output[0], theirs.model.layers[2].output)
    close(ours.model.layers[3].mlp.output[0], theirs.model.layers[3].mlp.output)
    assert [len(rows) for rows in ours.model.layers[2].output] == [len(model.tokenizer.encode(LONG)), 1]
    assert len(ours["model.logits"].output) == 2
    with pytest.raises(ChunkedPromptError, match="max_num_batched_tokens"):
        with model.trace(LONG, **GREEDY) as tracer:
            model.layers[1].output
            tracer.cache()


def cached(model: VLLM, modules: list[Any] | None) -> tuple[Any, str]:
    """Return a cache that is made behind the third layer, and what the trace warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with model.trace(PROMPT, **GREEDY) as tracer:
            model.layers[2].output
            cache = tracer.cache(modules=modules)
    assert all(one.filename == __file__ for one in caught)
    return cache, "\n".join(str(one.message) for one in caught)


def test_a_cache_says_what_it_missed_and_why(model: VLLM) -> None:
    late = [model.layers[1], model.model.layers[0].mlp.down_proj, model.layers[3]]
    cache, said = cached(model, late)
    assert list(cache) == ["model.model.layers.3"]
    assert said.count("model.model.layers.1.output, which had run before the cache was made") == 1
    assert "model.model.layers.0.mlp.down_proj.output, which had run before" in said
    assert "layers.3" not in said
    every = [str(envoy.path) for envoy in model.modules()]
    unheard = []
    for path in every:
        cache, said = cached(model, [path])
        assert (path in cache) != (f"{path}.output, which" in said), path
        if "which did not run" in said:
            unheard.append(path)
    assert "model.lm_head" in unheard
    assert "model.model.layers.3.mlp" not in unheard
    assert not cached(model, None)[1]
    warned = pytest.warns(UserWarning, match=r"model\.model\.layers\.0\.output, which had run before")
    with warned as caught, model.trace(temperature=1.0, max_tokens=1) as tracer:
        for text in (PROMPT, OTHER):
            with tracer.invoke(text, n=2):
                _ = model.layers[2].output
                tracer.cache(modules=[model.layers[0]])
    assert len(caught) == 1


def test_a_step_that_does_not_come_ends_the_block_with_a_warning(model: VLLM) -> None:
    warned = pytest.warns(UserWarning, match="The block ends here")
    with warned, model.trace(PROMPT, max_tokens=2, **GREEDY) as tracer:
        steps = save([model.samples.output.item()])
        tracer.next(2)
        steps.append(model.samples.output.item())
        steps.append("unreachable")
    assert len(steps) == 1


def caching(model: VLLM, number: int) -> SentTrace:
    """Return a trace of 90 tokens with a cache, and every second one with an edit."""
    prompt = f"{OTHER} and {number}" * 3
    edits = ["push"] if number % 2 else []
    with model.trace(
        prompt, max_tokens=90, ignore_eos=True, tracer_cls=HeldTracer, edits=edits, **GREEDY
    ) as tracer:
        cache = tracer.cache(modules=[model.layers[2], "model.samples"])  # noqa: F841 - fetched by name
    sent: SentTrace = tracer.sent
    return sent


def test_preempted_requests_cache_once_and_are_edited_again(model: VLLM) -> None:
    with model.edit(name="push"):
        model.layers[1].output[:] += DIRECTION * 0.3
    together = run_together(model, [caching(model, number) for number in range(8)])
    alone = [run_together(model, [caching(model, number)]) for number in range(8)]
    assert together.num_steps > 90 + 8 * 2, "nothing was preempted, so nothing was shown"
    for number in range(8):
        mine, theirs = together.outcomes[number], alone[number].outcomes[0]
        assert mine.error is None
        tokens = mine.saves["cache"]["model.samples"].output
        assert [int(token) for token in tokens] == together.tokens(f"trace-{number}")
        assert tokens == theirs.saves["cache"]["model.samples"].output
        for one, other in zip(
            mine.saves["cache"].model.layers[2].output,
            theirs.saves["cache"].model.layers[2].output,
            strict=True,
        ):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


def test_what_a_cache_cannot_do_is_said_at_its_line(model: VLLM) -> None:
    with pytest.raises(ValueError, match=r"model\.nothing"), model.trace(PROMPT) as tracer:
        tracer.cache(modules=["model.nothing"])
    with pytest.raises(ValueError, match="would stay empty"), model.trace(PROMPT) as tracer:
        tracer.cache(include_output=False)
    with pytest.raises((RuntimeError, AssertionError), match=r"(?i)cuda") as caught:
        with model.trace(PROMPT) as tracer:
            tracer.cache(device="cuda:7")  # the line
    assert any("# the line" in str(one.line) for one in traceback.extract_tb(caught.value.__traceback__))
    with pytest.raises(TraceBytesError, match="max_trace_bytes"), model.trace(LONG) as tracer:
        tracer.cache(include_inputs=True)
    assert not model.engine.collective_rpc("count_interventions")[0]["traced"]


# Names and classes of one's own.


def test_names_and_classes_of_ones_own_are_the_same_on_both(model: VLLM, local: LanguageModel) -> None:
    found = []
    for engine, options in ((model, GREEDY), (local, {})):
        with engine.trace(PROMPT, **options):
            embedded = engine.model.embed_tokens.half.save()
            first = engine.blocks[0].ff.half.save()
            half = engine.stages[1].feed.half
            half[:] = 3.0
            written = engine.layers[1].mlp.half.save()
            stream = engine.stages[2].output.save()
            heads = engine.stages[3].attention.heads.save()
            attended = engine.points["layers.3.attn.output"].save()
        found.append((embedded, first, written, stream, heads, attended))
    for ours, theirs in zip(*found, strict=True):
        close(ours, theirs)
    assert bool((found[0][2] == 3.0).all())


def test_the_class_has_the_name_that_ported_code_imports() -> None:
    assert modeling_vllm.VLLM is VLLM


def test_names_that_cannot_be_are_refused(model: VLLM, checkpoint: Path) -> None:
    with pytest.raises(TypeError, match="subclass of Envoy"):
        VLLM(str(checkpoint), envoys={LlamaMLP: torch.nn.Linear})  # type: ignore[dict-item] # the point
    with pytest.raises(ValueError, match="both"):
        model.ask_workers("adopt_names", Names({"mlp": "same", "self_attn": "same"}).write())
    with model.trace(PROMPT, **GREEDY):
        still = save(model.blocks[0].ff.half.shape)
    assert still[-1] == 128


@pytest.mark.parametrize("asked", ["call", "assignment", "not"])
def test_gradients_say_what_they_need(model: VLLM, asked: str) -> None:
    with pytest.raises(RuntimeError) as caught, model.trace(PROMPT, **GREEDY):
        hidden = model.layers[1].output
        if asked == "call":
            hidden.requires_grad_(True)
        elif asked == "assignment":
            hidden.requires_grad = True
        with model.logits.output.sum().backward():
            hidden.grad.save()
    said = [str(caught.value), *getattr(caught.value, "__notes__", ())]
    assert any("use LanguageModel, here or on a server with --local-engine" in text for text in said), said


# Edits.


def test_edits_do_what_they_do_locally(model: VLLM, local: LanguageModel) -> None:
    found = []
    for engine, options in ((model, GREEDY), (local, {})):
        scale = 2.0
        with engine.edit() as doubled:
            engine.layers[1].output[:] *= scale
        scale = 100.0
        with doubled.edit() as shifted:
            doubled.layers[1].output[:] += DIRECTION
            doubled.layers[2].mlp.output = doubled.layers[2].mlp.output * 0
        with engine.trace(PROMPT, **options):
            untouched = engine.layers[1].output.save()
        with doubled.trace(PROMPT, **options):
            once = doubled.layers[1].output.save()
        with shifted.trace(PROMPT, **options):
            twice = shifted.layers[1].output.save()
            silent = shifted.layers[2].mlp.output.save()
            last = shifted.layers[3].output.save()
        found.append((untouched, once, twice, silent, last))
        assert scale == 100.0
    for ours, theirs in zip(*found, strict=True):
        close(ours, theirs)
    untouched, once, twice, silent, _ = found[0]
    assert torch.equal(once, untouched * 2)
    assert torch.equal(twice, untouched * 2 + DIRECTION)
    assert not silent.any()


def test_edits_in_the_engine_are_chosen_by_name(model: VLLM) -> None:
    plain = plain_tokens(model, PROMPT, 4)
    with model.edit(name="force") as forced:
        model.logits.output = torch.nn.functional.one_hot(torch.tensor([7]), 319).float() * 100
    with model.edit(name="seven"):
        model.samples.output[:] += 1
    assert model.edits == ["force", "seven"]
    options: dict[str, Any] = {"max_tokens": 4, "ignore_eos": True, **GREEDY}
    with model.trace(PROMPT, edits=["force"], **options) as tracer:
        one = tracer.result.save()
    with forced.trace(PROMPT, edits="seven", **options) as tracer:
        both = tracer.result.save()
    with model.trace(edits=["force"], **options) as tracer:
        with tracer.invoke(PROMPT):
            first = tracer.result.save()
        with tracer.invoke(PROMPT, edits=[]):
            second = tracer.result.save()
    found = [list(result.outputs[0].token_ids) for result in (one, both, first, second)]
    assert found == [[7] * 4, [8] * 4, [7] * 4, plain]
    assert plain_tokens(model, PROMPT, 4) == plain
    with model.trace(PROMPT, edits=["force"], **GREEDY):
        pass
    model.remove_edit("force")
    for edited, names in ((model, ["force"]), (forced, [])):
        with pytest.raises(ValueError, match="no edit 'force'; the engine keeps 'seven'"):
            with edited.trace(PROMPT, edits=names):
                pass


def test_edits_in_place_hold_until_they_are_cleared(model: VLLM) -> None:
    seen: list[int] = []
    with model.edit(inplace=True):
        seen.append(1)
        model.layers[0].output[:] = float(len(seen))
    for _ in range(2):
        with model.trace(PROMPT, **GREEDY):
            out = model.layers[0].output.save()
        assert bool((out == 1).all()), "an edit saw what another request had made of its variables"
    assert seen == []
    model.clear_edits()
    with model.trace(PROMPT, **GREEDY):
        out = model.layers[0].output.save()
    assert not bool((out == 1).all())


def test_a_name_is_one_block_and_the_engine_takes_so_many(model: VLLM) -> None:
    for _ in range(2):
        with model.edit(name="same"):
            model.layers[0].output[:] = 0
    assert model.edits == ["same"]
    with pytest.raises(ValueError, match=r"another edit 'same'.*remove_edit"), model.edit(name="same"):
        model.layers[0].output[:] = 1
    with pytest.raises(ValueError, match="1 to 200 characters"):
        model.edit(name="").__enter__()
    for number in range(2):
        with model.edit(name=f"more {number}"):
            model.layers[0].output[:] = number
    with pytest.raises(EditLimitError, match="max_edits"), model.edit(name="too many"):
        model.layers[0].output[:] = 0
    with pytest.raises(ValueError, match="lock"), open("/dev/null") as lock, model.edit(name="same too"):
        lock.read()
    assert model.edits == ["same", "more 0", "more 1"]


def test_edits_and_chunks_of_a_prompt(model: VLLM) -> None:
    num_tokens = len(model.tokenizer.encode(LONG))
    value = torch.randn(num_tokens, 128, generator=torch.Generator().manual_seed(1))
    with model.edit() as replaced:
        model.model.layers[1].mlp.output = value
    with replaced.trace(LONG, **GREEDY):
        out = replaced.layers[1].mlp.output.save()
    assert torch.equal(out, value)
    with model.edit() as scaled:
        model.layers[1].mlp.output[:] *= 2
    with pytest.raises(ChunkedPromptError, match=r"layers\.1\.mlp") as caught, scaled.trace(LONG, **GREEDY):
        pass
    assert "in the edit" in caught.value.__notes__[0]


def failing(model: VLLM) -> list[HeldTracer]:
    """Return traces whose edits end badly, each in its own way."""
    options: dict[str, Any] = {"max_tokens": 8, "tracer_cls": HeldTracer, "ignore_eos": True, **GREEDY}
    held = []
    with model.edit() as broken:
        model.layers[1].output @ torch.ones(3)
    with model.edit() as endless:
        model.layers[1].output
        while True:
            pass
    with model.edit() as lost:
        model.layers[2].output
        model.layers[1].output
    with model.edit() as absent:
        model.model.layers[1].self_attn.rotary_emb.apply_rotary_emb.output
    for edited in (broken, endless, lost, absent):
        with edited.trace(PROMPT, **options) as tracer:
            out = save(edited.layers[3].output)  # noqa: F841 - never comes home
        held.append(tracer)
    with model.trace(PROMPT, **options) as tracer:
        tracer.cache(modules=[model.layers[1]])
        raise KeyError("mine")
    held.append(tracer)
    return held


def test_an_edit_that_fails_fails_its_own_request(model: VLLM) -> None:
    greedy = SamplingParams(max_tokens=8, logprobs=5, **GREEDY)
    neighbours = [Plain(f"{OTHER} {number}", greedy) for number in range(5)]
    quiet = run_together(model, [], neighbours)
    sent = [tracer.sent for tracer in failing(model)]
    with model.edit() as fine:
        model.layers[1].output[:] *= 1.5
    with fine.trace(PROMPT, max_tokens=8, tracer_cls=HeldTracer, **GREEDY) as well:
        cache = well.cache()  # noqa: F841 - fetched by name
    ran = run_together(model, [*sent, well.sent], neighbours, late=2)
    for number in range(5):
        ours, theirs = ran.outputs[f"plain-{number}"], quiet.outputs[f"plain-{number}"]
        assert list(ours.outputs[0].token_ids) == list(theirs.outputs[0].token_ids)
    errors = [ran.outcomes[number].error for number in range(len(sent))]
    names = [type(error).__name__ for error in errors]
    assert names == [
        "RuntimeError",
        "TimeBudgetError",
        "OutOfOrderError",
        "MissedProviderError",
        "KeyError",
    ]
    for number in range(4):
        assert any("in the edit" in note for note in getattr(errors[number], "__notes__", ()))
    assert ran.outcomes[len(sent)].error is None
    assert len(ran.outcomes[len(sent)].saves["cache"]) > 40


# Scans.


def test_a_scan_tells_shapes_and_keeps_nothing(model: VLLM) -> None:
    num_tokens = len(model.tokenizer.encode(PROMPT))
    with model.scan(PROMPT, max_tokens=2, ignore_eos=True) as tracer:
        hidden = model.layers[1].output.save()
        width = save(model.layers[2].mlp.output.shape[-1])
        logits = save([])
        for _ in tracer.iter[:]:
            logits.append(model.logits.output)
        result = tracer.result.save()
    assert (hidden.shape, hidden.is_meta, hidden.dtype) == ((num_tokens, 128), True, torch.float32)
    assert width == 128
    assert [(one.shape, one.is_meta) for one in logits] == [((1, 319), True)] * 2
    assert len(result.outputs[0].token_ids) == 2
    assert model.model.layers[1].mlp.output.shape == (num_tokens, 128)
    assert model.model.layers[2].mlp.input.shape == (num_tokens, 128)
    assert model.layers[3].attn.heads.shape == (num_tokens, 4, 32)
    assert model.points["layers.0.attn.pattern"].shape == (4, num_tokens, num_tokens)
    assert model.logits.output.shape == (1, 319)


class HeldCheck(HeldTracer):
    """A trace that is encoded to be checked."""

    def _run_model(self) -> None:
        self.sent = SentTrace(self, Purpose.CHECK)


def test_a_check_comes_before_the_run(model: VLLM) -> None:
    ran = []
    with pytest.raises(RuntimeError, match="size mismatch") as caught:
        with model.trace(PROMPT, validate=True):
            ran = save([1])
            model.layers[1].output @ torch.ones(3)  # the line
    assert ran == []
    assert any("# the line" in str(one.line) for one in traceback.extract_tb(caught.value.__traceback__))
    kept: list[int] = save([])
    with model.trace(PROMPT, validate=True, max_tokens=4, ignore_eos=True, **GREEDY) as tracer:
        third = save(0)
        for step in tracer.iter[2]:
            third = save(step)
        for _ in tracer.iter[3:]:
            tokens = model.samples.output.save()
    assert third == 2
    assert kept == []
    assert int(tokens) == plain_tokens(model, PROMPT, 4)[-1]
    with model.trace(PROMPT, validate=True, max_tokens=4, ignore_eos=True, **GREEDY) as tracer:
        several = []
        for step in tracer.iter[:]:
            several += [step]
        last = save(several[3])
    assert last == 3
    with model.trace(PROMPT, max_tokens=60, tracer_cls=HeldCheck, ignore_eos=True) as held:
        for _ in held.iter[:]:
            model.layers[1].output[:] = 0
    assert run_together(model, [held.sent]).num_steps < 10, "a check ends once a block asks for nothing new"
    with pytest.raises(MissedProviderError, match="step 2 did not come"):
        with model.trace(PROMPT, scan=True) as tracer:
            for _ in tracer.iter[2]:
                pass


def test_statements_that_would_do_nothing_are_refused(model: VLLM) -> None:
    with pytest.raises(WithBlockNotFoundError, match=r"with model.trace\(\.\.\.\):"):
        model.trace(PROMPT)
    with pytest.raises(WithBlockNotFoundError, match=r"with model.scan\(\.\.\.\):"):
        model.scan(PROMPT)
    with pytest.raises(WithBlockNotFoundError, match=r"with model.edit\(\.\.\.\):"):
        model.edit()
    with pytest.raises(TypeError, match="fn="):
        _ = model.trace(PROMPT, fn=print)


# What a request is given.


def test_sampling_parameters_come_by_name_or_as_an_object(model: VLLM) -> None:
    def lengths(*invokes: dict[str, Any], **trace: Any) -> list[int]:
        with model.trace(**trace) as tracer:
            outputs = save([])
            for options in invokes:
                with tracer.invoke(PROMPT, **options):
                    outputs.append(tracer.result)
        return sorted(len(output.outputs[0].token_ids) for output in outputs)

    params = SamplingParams(max_tokens=4, ignore_eos=True, **GREEDY)
    mine = SamplingParams(max_tokens=2, ignore_eos=True, **GREEDY)
    own: list[dict[str, Any]] = [{}, {"max_tokens": 3}, {"sampling_params": mine}, {"max_new_tokens": 5}]
    assert lengths(*own, sampling_params=params) == [2, 3, 4, 5]
    assert lengths({}, {"max_tokens": 3}, sampling_params=params, max_tokens=6) == [3, 6]
    assert lengths({"sampling_params": params, "max_tokens": 7}, {}) == [1, 7]
    assert lengths({"max_new_tokens": 3}, {}, max_tokens=2, ignore_eos=True) == [2, 3]
    assert (params.max_tokens, mine.max_tokens) == (4, 2)
    with model.trace(PROMPT, sampling_params=params, max_tokens=3, logprobs=2) as tracer:
        result = tracer.result.save()
    assert len(result.outputs[0].logprobs) == 3
    with model.trace(
        PROMPT, sampling_params=SamplingParams(max_tokens=3), **GREEDY, ignore_eos=True
    ) as tracer:
        result = tracer.result.save()
    assert list(result.outputs[0].token_ids) == plain_tokens(model, PROMPT, 3)


def test_what_would_have_no_effect_is_refused(model: VLLM) -> None:
    params = SamplingParams(max_tokens=4)
    for options, named in (
        ({"nonsense": 8}, "no sampling parameter nonsense"),
        ({"sampling_params": params, "nonsense": 8}, "no sampling parameter nonsense"),
        ({"temprature": 0.0}, "did you mean temperature"),
        ({"sampling_params": {"max_tokens": 8}}, "takes vLLM's SamplingParams, got dict"),
        ({"max_tokens": 1, "max_new_tokens": 2}, "same parameter"),
    ):
        with pytest.raises(TypeError, match=named):
            with model.trace(PROMPT, **options):
                pass
        with pytest.raises(TypeError, match=named):
            with model.trace() as tracer:
                with tracer.invoke(PROMPT, **options):
                    pass
        with pytest.raises(TypeError, match=named):
            with model.trace(**options) as tracer:
                with tracer.invoke(PROMPT):
                    pass
    with pytest.raises(TypeError, match="those of the trace would have no effect: temperature"):
        with model.trace(temperature=0.0) as tracer:
            with tracer.invoke(PROMPT, sampling_params=params):
                pass
    with pytest.raises(VLLMValidationError, match="temperature"):
        with model.trace(PROMPT, sampling_params=params, temperature=-1.0):
            pass


def test_tokens_come_in_any_form(model: VLLM, local: LanguageModel) -> None:
    ids = model.tokenizer.encode(PROMPT)
    encoded = model.tokenizer([PROMPT], return_tensors="np")
    filled = model.tokenizer([PROMPT, LONG], return_tensors="pt", padding=True)
    forms: list[Any] = [
        np.array(ids), np.array([ids], np.int32), [np.int64(token) for token in ids], encoded, tuple(ids),
        torch.tensor([ids], dtype=torch.int32), {name: value[:1] for name, value in filled.items()},
    ]  # fmt: skip
    with model.trace(**GREEDY) as tracer:
        seen = save([])
        for form in forms:
            with tracer.invoke(form):
                seen.append(model.layers[1].output)
        with tracer.invoke(**encoded):
            seen.append(model.layers[1].output)
    with local.trace(PROMPT):
        expected = local.layers[1].output.save()
    assert len(seen) == len(forms) + 1
    for value in seen:
        close(value, expected)


def test_logits_have_one_name_on_both(model: VLLM, local: LanguageModel) -> None:
    found = []
    for traced, options in ((model, GREEDY), (local, {})):
        with traced.trace(PROMPT, **options):
            logits = traced.points["logits"][..., -1, :].save()
        found.append(logits.flatten())
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)
    wanted = torch.full((1, found[0].shape[-1]), -1e3)
    wanted[:, 42] = 0
    with model.trace(PROMPT, **GREEDY):
        model.points["logits"] = wanted
        token = model.samples.output.item().save()
    assert token == 42
    with local.trace(PROMPT):
        local.points["logits"][:, -1] = wanted
        token = local.output.logits[0, -1].argmax().item().save()
    assert token == 42
