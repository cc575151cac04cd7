"""A model that sees computes what transformers computes from the same texts and images."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from nnsight_engine.envoys.architectures.named_points import PointValueError, UnknownPointError
from nnsight_engine.modeling.vision_language import VisionLanguageModel
from tests.families.seeing import IMAGE_TOKEN, picture, write_idefics3

SHORT = f"{IMAGE_TOKEN} the city"
LONG = f" Paris is the city of love {IMAGE_TOKEN} and Rome is good"


@dataclass
class Seeing:
    path: Path
    model: VisionLanguageModel
    plain: Any

    def inputs(self, text: str, image: Image.Image | None) -> Any:
        if image is None:
            return self.model.tokenizer(text, return_tensors="pt")
        return self.model.processor(text=[text], images=[[image]], return_tensors="pt")

    def logits(self, text: str, image: Image.Image | None) -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = self.plain(**self.inputs(text, image)).logits[0]
        return logits

    def encoded(self, image: Image.Image) -> list[torch.Tensor]:
        """Return what each block of the encoder gives."""
        pixels = self.inputs(SHORT, image)["pixel_values"].flatten(0, 1)
        with torch.no_grad():
            found = self.plain.model.vision_model(pixels, output_hidden_states=True).hidden_states
        return list(found[1:])


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    path = write_idefics3(tmp_path_factory.mktemp("idefics3"))
    plain = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    return Seeing(path, VisionLanguageModel(path, dtype=torch.float32, dispatch=True), plain)


def test_logits_are_those_of_transformers(seeing: Seeing) -> None:
    with torch.no_grad(), seeing.model.trace(LONG, images=[picture(1)]):
        logits = seeing.model.output.logits.save()
    assert torch.equal(logits[0], seeing.logits(LONG, picture(1)))


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


def test_inputs_may_have_names_or_come_from_the_processor(seeing: Seeing) -> None:
    with torch.no_grad(), seeing.model.trace(seeing.inputs(LONG, picture(1))):
        processed = seeing.model.output.logits.save()
    with torch.no_grad(), seeing.model.trace(text=LONG, images=[picture(1)]):
        named = seeing.model.output.logits.save()
    assert torch.equal(processed[0], seeing.logits(LONG, picture(1)))
    assert torch.equal(named, processed)


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
        pytest.raises(ValueError, match="pixel_values of all invokes must have one shape"),
        seeing.model.trace() as tracer,
    ):
        with tracer.invoke(SHORT, images=[picture(1)]):
            pass
        with tracer.invoke({**prepared, "pixel_values": torch.zeros(1, 5, 3, 32, 32)}):
            pass


# Points of the encoder.


def test_blocks_of_the_encoder_are_points(seeing: Seeing) -> None:
    model = seeing.model
    names = [name for name in model.points if name.startswith("vision.")]
    assert names == [f"vision.layers.{layer}.output" for layer in range(3)]
    assert model.points()[names[0]] == (64,)
    assert "vision.layers.*.output (64,)" in repr(model.points)
    with torch.no_grad(), model.trace(SHORT, images=[picture(1)]):
        rows = [model.points[name].save() for name in names]
        logits = model.logits.save()
    for own, expected in zip(rows, seeing.encoded(picture(1)), strict=True):
        torch.testing.assert_close(own, expected, rtol=0, atol=1e-4)
    other = seeing.encoded(picture(2))[1]
    with torch.no_grad(), model.trace(SHORT, images=[picture(1)]):
        model.points[names[1]] = other
        replaced = model.logits.save()
    with torch.no_grad(), model.trace(SHORT, images=[picture(2)]):
        expected = model.logits.save()
    torch.testing.assert_close(replaced, expected, rtol=0, atol=1e-4)
    assert (logits - expected).abs().max() > 0.01


def test_images_of_several_invokes_are_not_divided(seeing: Seeing) -> None:
    model = seeing.model

    def divide() -> None:
        with torch.no_grad(), model.trace() as tracer:
            with tracer.invoke(SHORT, images=[picture(1)]):
                model.points["vision.layers.0.output"].save()
            with tracer.invoke(SHORT, images=[picture(2)]):
                model.logits.save()

    with pytest.raises(PointValueError, match="images of all invokes"):
        divide()


def test_a_layer_that_the_encoder_lacks_is_unknown(seeing: Seeing) -> None:
    with pytest.raises(UnknownPointError, match=r"vision\.layers\.\*\.output"):
        seeing.model.points["vision.layers.3.output"]
