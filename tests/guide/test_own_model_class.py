"""A class for a family of models, with its own loading, batching and envoys."""

# Views are defined as the guide does, by the name of the stub, as a setter is.
# mypy: disable-error-code="no-redef"

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from nnsight_engine.intervention.envoy import Envoy, eproperty
from nnsight_engine.intervention.hooks import requires_output
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from nnsight_engine import LanguageModel, NNsight
from tests.guide.alone import module_of
from tests.guide.attention import WIDTH, Attender, Attention, AttnEnvoy, Block, BlockEnvoy
from tests.hook_reference import outputs_of


class MyModel(NNsight):
    """Root envoy for the Attender family: takes a text, one token per letter, and pads with spaces."""

    envoys: ClassVar[Any] = {Attention: AttnEnvoy, Block: BlockEnvoy}

    def __init__(self, name_or_model: str | torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        """Load by name, or wrap what is loaded."""
        module = self._load_from_name(name_or_model) if isinstance(name_or_model, str) else name_or_model
        super().__init__(module, *args, **kwargs)

    def _load_from_name(self, name: str) -> torch.nn.Module:
        if name != "attender":
            raise ValueError(f"the family has only 'attender', got {name!r}")
        return Attender()

    def _prepare_input(self, *inputs: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any], int]:
        if not inputs:
            return (), {}, 0
        (texts,) = inputs
        texts = [texts] if isinstance(texts, str) else texts
        return (encoded(*texts),), kwargs, len(texts)

    def _batch(
        self, batched_input: tuple[tuple[Any, ...], dict[str, Any]], *inputs: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        ((so_far,), shared), (added,) = batched_input, inputs
        return (torch.cat([so_far, added]),), {**shared, **kwargs}

    def __nnsight_generate__(self, *args: Any, num_steps: int = 1, **kwargs: Any) -> Any:
        """Run several times, for ``with model.generate(...)``."""
        return [self._module(*args, **kwargs) for _ in range(num_steps)][-1]

    def generate(self, *inputs: Any, **kwargs: Any) -> Any:
        """Open a trace of several steps."""
        return self.trace(*inputs, fn=self.__nnsight_generate__, **kwargs)


def encoded(*texts: str) -> torch.Tensor:
    """Return each text as ``[4, WIDTH]`` of numbers."""
    codes = [[ord(letter) / 128 for letter in text.ljust(4)] for text in texts]
    return torch.tensor(codes).unsqueeze(2).repeat(1, 1, WIDTH)


@pytest.fixture
def model() -> MyModel:
    """A model of the family, loaded by its name."""
    return MyModel("attender")


def test_a_model_is_loaded_by_name_or_wrapped(model: MyModel) -> None:
    assert isinstance(model._module, Attender)
    module = Attender()
    assert MyModel(module)._module is module
    with pytest.raises(ValueError, match="got 'nothing'"):
        MyModel("nothing")


def test_users_get_the_familys_envoys_without_asking(model: MyModel) -> None:
    with model.trace("abc"):
        heads = model.layers[1].self_attn.heads
        first_head = heads[0].save()
        hidden = model.layers[1].hidden.save()
    attended, (plain_hidden, _) = outputs_of(
        model._module, {"x": encoded("abc")}, "layers.1.self_attn", "layers.1"
    )
    assert torch.equal(first_head, attended[..., : WIDTH // 4])
    assert torch.equal(hidden, plain_hidden)


def test_envoys_are_overridden_or_left_out_for_one_instance() -> None:
    class Other(Envoy):
        """Stands for attention, too."""

    assert type(MyModel("attender", envoys={Attention: Other}).layers[0].self_attn) is Other
    plain = MyModel("attender", envoys=None)
    assert type(plain.layers[0].self_attn) is Envoy
    assert type(MyModel("attender").layers[0]) is BlockEnvoy


def test_a_familys_generate_is_a_trace_of_its_steps(model: MyModel) -> None:
    with model.generate("abc", num_steps=3) as tracer:
        steps = [].save()  # type: ignore[attr-defined]
        for step in tracer.iter[:]:
            model.layers[0].hidden[:] *= step
            steps.append(model.output)
        result = tracer.result.save()
    assert len(steps) == 3
    assert torch.equal(steps[1], model._module(encoded("abc")))
    assert torch.equal(result, steps[2])
    assert not torch.equal(steps[0], steps[1])


class LensBlockEnvoy(Envoy):
    """A block that reads its own predictions, with parts of the model that stand elsewhere in the tree."""

    _lens_norm: torch.nn.Module
    _lens_head: torch.nn.Module

    @eproperty(key="output")
    @requires_output
    def lens(self) -> Any:
        """Logit-lens projection of this block's hidden state."""

    @lens.preprocess
    def lens(self, value: Any) -> Any:
        hidden = value[0] if isinstance(value, tuple) else value
        return self._lens_head(self._lens_norm(hidden))


class LensLanguageModel(LanguageModel):
    """A GPT-2 whose blocks have ``.lens``."""

    envoys: ClassVar[Any] = {GPT2Block: LensBlockEnvoy}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Give each block the norm and the head."""
        super().__init__(*args, **kwargs)
        module: Any = self._module
        for block in self.transformer.h:
            block.__dict__["_lens_norm"] = module.transformer.ln_f
            block.__dict__["_lens_head"] = module.lm_head


def test_a_root_class_gives_blocks_parts_from_elsewhere_in_the_tree(local_gpt2: LanguageModel) -> None:
    gpt2 = local_gpt2
    model = LensLanguageModel(gpt2._module, tokenizer=gpt2.tokenizer)
    with model.trace(" the city of"):
        per_layer_tokens = [b.lens.argmax(-1).save() for b in model.transformer.h]
        logits = model.lm_head.output.save()
    plain: Any = module_of(gpt2)
    inputs = gpt2.tokenizer(" the city of", return_tensors="pt")
    hiddens = outputs_of(plain, inputs, *(f"transformer.h.{index}" for index in range(4)))
    assert len(per_layer_tokens) == 4
    for tokens, hidden in zip(per_layer_tokens, hiddens, strict=True):
        assert torch.equal(tokens, plain.lm_head(plain.transformer.ln_f(hidden)).argmax(-1))
    assert torch.equal(logits, plain(**inputs).logits)
    assert torch.equal(per_layer_tokens[-1], logits.argmax(-1))
