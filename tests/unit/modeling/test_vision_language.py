"""A model that sees computes what transformers computes from the same texts and images."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    AutoModelForImageTextToText,
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
)

from nnsight_engine.envoys.architectures.errors import PointValueError, UnknownPointError
from nnsight_engine.modeling.invokes import InvokesDifferError
from nnsight_engine.modeling.vision_language import VisionLanguageModel
from tests.families.checkpoints import build_tokenizer
from tests.families.seeing import IMAGE_TOKEN, write_idefics3
from tests.families.seeing import picture as colours

SIZE, PATCH = 8, 4
MARK = "<image>"
SHORT = f"{MARK} the city"
LONG = f" Paris is the city of love {MARK} and Rome is good"


@dataclass
class Seeing:
    path: Path
    model: VisionLanguageModel
    plain: LlavaForConditionalGeneration

    def inputs(self, text: str, image: Image.Image | None) -> Any:
        if image is None:
            return self.model.tokenizer(text, return_tensors="pt")
        return self.model.processor(text=[text], images=[image], return_tensors="pt")

    def logits(self, text: str, image: Image.Image | None) -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = self.plain(**self.inputs(text, image)).logits[0]
        return logits


def picture(seed: int) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 255, (SIZE, SIZE, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    path = tmp_path_factory.mktemp("llava")
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [MARK]})
    vision = CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=SIZE,
        patch_size=PATCH,
    )
    text = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=tokenizer.convert_tokens_to_ids(MARK),
        image_seq_length=(SIZE // PATCH) ** 2,
    )
    torch.manual_seed(0)
    LlavaForConditionalGeneration(config).save_pretrained(path)
    images = CLIPImageProcessorPil(
        size={"shortest_edge": SIZE}, crop_size={"height": SIZE, "width": SIZE}, do_convert_rgb=True
    )
    LlavaProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token=MARK,
    ).save_pretrained(path)
    plain = LlavaForConditionalGeneration.from_pretrained(path, dtype=torch.float32)
    return Seeing(path, VisionLanguageModel(path, dtype=torch.float32, dispatch=True), plain)


def test_logits_are_those_of_transformers(seeing: Seeing) -> None:
    with torch.no_grad(), seeing.model.trace(LONG, images=[picture(1)]):
        logits = seeing.model.output.logits.save()
    assert torch.equal(logits[0], seeing.logits(LONG, picture(1)))


def test_the_image_matters(seeing: Seeing) -> None:
    assert not torch.allclose(seeing.logits(LONG, picture(1)), seeing.logits(LONG, picture(2)), atol=1e-5)


def test_the_tower_that_sees_can_be_read(seeing: Seeing) -> None:
    with seeing.model.trace(SHORT, images=picture(1)):
        features = seeing.model.model.vision_tower.output.last_hidden_state.save()
    assert features.shape == (1, (SIZE // PATCH) ** 2 + 1, 16)


def test_invokes_with_and_without_images_are_as_if_alone(seeing: Seeing) -> None:
    model, words = seeing.model, " I love dogs"
    with torch.no_grad(), model.trace() as tracer:
        with tracer.invoke(SHORT, images=[picture(1)]):
            first = model.output.logits.save()
        with tracer.invoke(words):
            second = model.output.logits.save()
        with tracer.invoke(LONG, images=[picture(2)]):
            third = model.output.logits.save()
    for found, text, image in ((first, SHORT, picture(1)), (second, words, None), (third, LONG, picture(2))):
        expected = seeing.logits(text, image)
        torch.testing.assert_close(found[0, -len(expected) :], expected, rtol=1e-4, atol=1e-5)


def test_one_invoke_of_several_texts(seeing: Seeing) -> None:
    with torch.no_grad(), seeing.model.trace([SHORT, LONG], images=[picture(1), picture(2)]):
        logits = seeing.model.output.logits.save()
    expected = seeing.logits(SHORT, picture(1))
    torch.testing.assert_close(logits[0, -len(expected) :], expected, rtol=1e-4, atol=1e-5)


def test_generated_tokens_are_those_of_transformers(seeing: Seeing) -> None:
    model, arguments = seeing.model, {"max_new_tokens": 3, "min_new_tokens": 3}
    with model.generate(**arguments) as tracer:
        with tracer.invoke(SHORT, images=[picture(1)]):
            short = tracer.result.save()
        with tracer.invoke(LONG, images=[picture(2)]):
            long = tracer.result.save()
    for found, text, image in ((short, SHORT, picture(1)), (long, LONG, picture(2))):
        expected = seeing.plain.generate(**seeing.inputs(text, image), **arguments)
        assert found[0, -3:].tolist() == expected[0, -3:].tolist()
    called = model.generate(SHORT, images=[picture(1)], **arguments)
    assert called[0, -3:].tolist() == short[0, -3:].tolist()


def test_what_the_processor_returns_is_taken_as_it_is(seeing: Seeing) -> None:
    with torch.no_grad(), seeing.model.trace(seeing.inputs(LONG, picture(1))):
        logits = seeing.model.output.logits.save()
    assert torch.equal(logits[0], seeing.logits(LONG, picture(1)))


def test_text_and_images_by_name(seeing: Seeing) -> None:
    with torch.no_grad(), seeing.model.trace(text=LONG, images=[picture(1)]):
        logits = seeing.model.output.logits.save()
    assert torch.equal(logits[0], seeing.logits(LONG, picture(1)))


def test_a_loaded_model_comes_with_its_processor(seeing: Seeing) -> None:
    model = VisionLanguageModel(seeing.plain, processor=seeing.model.processor)
    assert model.tokenizer is seeing.model.processor.tokenizer
    with pytest.raises(AttributeError, match="Processor not found"):
        VisionLanguageModel(seeing.plain)


def test_weights_come_with_the_first_run(seeing: Seeing) -> None:
    model = VisionLanguageModel(seeing.path, tokenizer=seeing.model.tokenizer)
    with model.scan(" I love dogs"):
        shape = model.output.logits.shape.save()
    before = model.dispatched
    with torch.no_grad(), model.trace(SHORT, images=[picture(1)]):
        logits = model.output.logits.save()
    assert (before, model.dispatched) == (False, True)
    assert shape[-1] == model.config.text_config.vocab_size
    assert torch.equal(logits[0], seeing.logits(SHORT, picture(1)))


def test_images_without_text_are_refused(seeing: Seeing) -> None:
    with pytest.raises(TypeError, match="images need a text"), seeing.model.trace(images=[picture(1)]):
        pass


def test_images_of_unlike_size_are_refused(seeing: Seeing) -> None:
    prepared = dict(seeing.inputs(SHORT, picture(1)))
    with (  # noqa: PT012 - a trace fails where its block ends
        pytest.raises(InvokesDifferError, match="pixel_values of all invokes must have one shape"),
        seeing.model.trace() as tracer,
    ):
        with tracer.invoke(SHORT, images=[picture(1)]):
            pass
        with tracer.invoke({**prepared, "pixel_values": torch.zeros(1, 3, SIZE * 2, SIZE * 2)}):
            pass


# Points of the encoder.


@dataclass
class Encoder:
    model: VisionLanguageModel
    plain: Any

    def outputs(self, image: Image.Image) -> list[torch.Tensor]:
        inputs = self.model.processor(text=[IN_TWO], images=[[image]], return_tensors="pt")
        found = self.plain.model.vision_model(
            inputs["pixel_values"].flatten(0, 1), output_hidden_states=True
        ).hidden_states
        return list(found[1:])


IN_TWO = f"{IMAGE_TOKEN} the city"


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    path = write_idefics3(tmp_path_factory.mktemp("idefics3"))
    plain = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    return Encoder(VisionLanguageModel(path, dtype=torch.float32, dispatch=True), plain)


def test_blocks_of_the_encoder_are_points(encoder: Encoder) -> None:
    model = encoder.model
    names = [name for name in model.points if name.startswith("vision.")]
    assert names == [f"vision.layers.{layer}.output" for layer in range(3)]
    assert model.points()[names[0]] == (64,)
    assert "vision.layers.*.output (64,)" in repr(model.points)
    with torch.no_grad(), model.trace(IN_TWO, images=[colours(1)]):
        rows = [model.points[name].save() for name in names]
        logits = model.logits.save()
    with torch.no_grad():
        for own, expected in zip(rows, encoder.outputs(colours(1)), strict=True):
            torch.testing.assert_close(own, expected, rtol=0, atol=1e-4)
        other = encoder.outputs(colours(2))[1]
    with torch.no_grad(), model.trace(IN_TWO, images=[colours(1)]):
        model.points[names[1]] = other
        replaced = model.logits.save()
    with torch.no_grad(), model.trace(IN_TWO, images=[colours(2)]):
        expected = model.logits.save()
    torch.testing.assert_close(replaced, expected, rtol=0, atol=1e-4)
    assert (logits - expected).abs().max() > 0.01


def test_images_of_several_invokes_are_not_divided(encoder: Encoder) -> None:
    model = encoder.model

    def divide() -> None:
        with torch.no_grad(), model.trace() as tracer:
            with tracer.invoke(IN_TWO, images=[colours(1)]):
                model.points["vision.layers.0.output"].save()
            with tracer.invoke(IN_TWO, images=[colours(2)]):
                model.logits.save()

    with pytest.raises(PointValueError, match="images of all invokes"):
        divide()


def test_a_layer_that_the_encoder_lacks_is_unknown(encoder: Encoder, seeing: Seeing) -> None:
    with pytest.raises(UnknownPointError, match=r"vision\.layers\.\*\.output"):
        encoder.model.points["vision.layers.3.output"]
    with pytest.raises(UnknownPointError):
        seeing.model.points["vision.layers.0.output"]
