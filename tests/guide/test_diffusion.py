"""A diffusion pipeline, whose denoising steps are iterated like tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nnsight_engine import DiffusionModel, save
from tests.hook_reference import edited, recorded
from tests.unit.modeling.test_diffusion import write_pipeline

PROMPT = "A cat sitting on a mat"
STEPS = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DiffusionModel:
    path: Path = write_pipeline(tmp_path_factory.mktemp("pipeline"))
    model = DiffusionModel(path, dispatch=True)
    model.pipeline.set_progress_bar_config(disable=True)
    return model


def image(model: DiffusionModel) -> torch.Tensor:
    """Return what the pipeline alone makes of the prompt."""
    generator = torch.Generator().manual_seed(0)
    made: Any = model.pipeline(PROMPT, num_inference_steps=STEPS, generator=generator, output_type="pt")
    found: torch.Tensor = made.images
    return found


def test_components_of_the_pipeline_are_modules_that_can_be_traced(model: DiffusionModel) -> None:
    assert model.unet._module is model.pipeline.unet
    assert model.text_encoder._module is model.pipeline.text_encoder
    assert model.vae._module is model.pipeline.vae


def test_the_denoiser_is_read_at_each_step(model: DiffusionModel) -> None:
    with model.generate(PROMPT, num_inference_steps=STEPS, seed=0, output_type="pt") as tracer:
        predictions = save([])
        for _ in tracer.iter[:]:
            predictions.append(model.unet.output[0].clone())
        output = tracer.result.save()

    with recorded(model._module, "unet") as plain:
        expected = image(model)
    assert torch.equal(output.images, expected)
    assert len(predictions) == STEPS
    assert all(map(torch.equal, predictions, [value[0] for value in plain["unet"]]))


def test_early_steps_are_intervened_on(model: DiffusionModel) -> None:
    with model.generate(PROMPT, num_inference_steps=STEPS, seed=0, output_type="pt") as tracer:
        for step in tracer.iter[:]:
            if step < 2:
                model.unet.output[0][:] *= 1.1
        output = tracer.result.save()

    with edited(model._module, "unet", lambda value: (value[0] * 1.1,), calls=range(2)):
        expected = image(model)
    assert torch.equal(output.images, expected)
    assert not torch.equal(output.images, image(model))


def test_a_call_goes_to_the_denoiser(model: DiffusionModel) -> None:
    latents, text = torch.zeros(1, 4, 8, 8), torch.zeros(1, 3, 16)
    with model.trace(latents, 1, encoder_hidden_states=text):
        prediction = model.unet.output[0].save()
    expected = model.pipeline.unet(latents, 1, encoder_hidden_states=text).sample
    assert torch.equal(prediction, expected)
