"""A pipeline through traces makes the images that diffusers makes; its steps can be read and edited."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from nnsight_engine.core.saves import save
from nnsight_engine.modeling.diffusion import DiffusionModel, generators
from tests.hook_reference import edited, recorded

diffusers = pytest.importorskip("diffusers")

STEPS = 2
CAT, DOG = "a cat", "a dog on a mat"
SEEDED = {"num_inference_steps": STEPS, "seed": 3, "output_type": "pt"}


@dataclass
class Painting:
    path: Path
    model: DiffusionModel
    plain: Any

    def image(self, prompt: str, seed: int, **kwargs: Any) -> torch.Tensor:
        """Return what diffusers makes, ``[3, height, width]``."""
        generator = torch.Generator().manual_seed(seed)
        arguments = {"num_inference_steps": STEPS, "output_type": "pt", **kwargs}
        image: torch.Tensor = self.plain(prompt, generator=generator, **arguments).images[0]
        return image


def write_pipeline(path: Path) -> Path:
    characters = [chr(code) for code in range(33, 127)]
    vocab = [
        *characters,
        *(f"{character}</w>" for character in characters),
        "<|startoftext|>",
        "<|endoftext|>",
    ]
    tokenizer = CLIPTokenizer(
        vocab={token: index for index, token in enumerate(vocab)}, merges=[], model_max_length=16
    )
    torch.manual_seed(0)
    text = CLIPTextConfig(
        vocab_size=len(vocab),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
        bos_token_id=len(vocab) - 2,
        eos_token_id=len(vocab) - 1,
        pad_token_id=len(vocab) - 1,
    )
    unet = diffusers.UNet2DConditionModel(
        block_out_channels=(8, 16),
        layers_per_block=1,
        sample_size=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=16,
        attention_head_dim=4,
        norm_num_groups=4,
    )
    vae = diffusers.AutoencoderKL(
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        norm_num_groups=4,
        sample_size=16,
    )
    pipeline = diffusers.StableDiffusionPipeline(
        vae=vae,
        text_encoder=CLIPTextModel(text),
        tokenizer=tokenizer,
        unet=unet,
        scheduler=diffusers.DDIMScheduler(steps_offset=1, beta_schedule="scaled_linear", clip_sample=False),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipeline.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def painting(tmp_path_factory: pytest.TempPathFactory) -> Painting:
    path = write_pipeline(tmp_path_factory.mktemp("pipeline"))
    model = DiffusionModel(path, dispatch=True)
    plain = diffusers.DiffusionPipeline.from_pretrained(path)
    for pipeline in (model.pipeline, plain):
        pipeline.set_progress_bar_config(disable=True)
    return Painting(path, model, plain)


@pytest.mark.parametrize("bounded", [False, True])
def test_loops_end_with_the_last_step_and_what_follows_can_be_read(painting: Painting, bounded: bool) -> None:
    model, seen = painting.model, []

    def note(_pipe: Any, step: int, _time: Any, values: dict[str, Any]) -> dict[str, Any]:
        seen.append(step)
        return values

    with model.generate(CAT, **SEEDED, callback_on_step_end=note) as tracer:
        steps = save([])
        for step in tracer.iter[: STEPS if bounded else None]:
            model.unet.output[0].shape  # noqa: B018 - waits for the step
            steps.append(step)
        pixels = model.vae.decoder.output.save()
        image = tracer.result.images.save()
    assert steps == seen == list(range(STEPS))
    assert pixels.shape == (1, 3, 16, 16)
    assert torch.equal(image[0], painting.image(CAT, 3))


@pytest.mark.parametrize("arguments", [{}, {"guidance_scale": 1.0}, {"num_images_per_prompt": 2}])
def test_images_of_several_invokes_are_as_if_alone(painting: Painting, arguments: dict[str, Any]) -> None:
    model = painting.model
    with model.generate(**SEEDED, **arguments) as tracer:
        with tracer.invoke(CAT):
            cat = tracer.result.save()
        with tracer.invoke([DOG, CAT]):
            noise = model.unet.output[0].save()
            dogs = tracer.result.save()
    num_images = arguments.get("num_images_per_prompt", 1)
    num_blocks = 1 if "guidance_scale" in arguments else 2
    assert (len(cat.images), len(dogs.images), len(noise)) == (
        num_images,
        2 * num_images,
        2 * num_images * num_blocks,
    )
    once = {name: value for name, value in arguments.items() if name == "guidance_scale"}
    torch.testing.assert_close(cat.images[0], painting.image(CAT, 3, **once))
    torch.testing.assert_close(dogs.images[0], painting.image(DOG, 3 + num_images, **once))


def test_steps_are_read_and_edited(painting: Painting) -> None:
    model = painting.model
    with model.generate(CAT, **SEEDED) as tracer:
        text = model.text_encoder.output.last_hidden_state.save()
        noise = save([])
        for step in tracer.iter[:]:
            if step == 1:
                model.unet.output[0][:] *= 1.1
            noise.append(model.unet.output[0].clone())
        image = tracer.result.images.save()
    with (
        edited(painting.plain.unet, "", lambda value: (value[0] * 1.1,), calls=range(1, 2)),
        recorded(painting.plain.unet, "") as plain,
    ):
        expected = painting.image(CAT, 3)
    assert text.shape == (1, 16, 16)
    assert [one.shape for one in noise] == [(2, 4, 8, 8)] * STEPS  # guided: without and with the prompt
    assert all(map(torch.equal, noise, [value[0] for value in plain[""]]))
    assert torch.equal(image[0], expected)
    assert not torch.equal(expected, painting.image(CAT, 3))


def test_an_edit_of_one_invoke_leaves_the_others_alone(painting: Painting) -> None:
    model = painting.model
    with model.generate(**SEEDED) as tracer:
        with tracer.invoke(CAT):
            for _ in tracer.iter[:]:
                model.unet.output[0][:] *= 0.5
            cat = tracer.result.images.save()
        with tracer.invoke([DOG, CAT]):
            dogs = tracer.result.images.save()
    with model.generate(CAT, **SEEDED) as tracer:
        for _ in tracer.iter[:]:
            model.unet.output[0][:] *= 0.5
        alone = tracer.result.images.save()
    torch.testing.assert_close(cat, alone)
    torch.testing.assert_close(dogs[0], painting.image(DOG, 4))


def test_pictures_are_shared_out_too(painting: Painting) -> None:
    with painting.model.generate(num_inference_steps=1, seed=0) as tracer:
        with tracer.invoke(CAT):
            cat = tracer.result.save()
        with tracer.invoke(DOG):
            dog = tracer.result.save()
    assert (len(cat.images), len(dog.images)) == (1, 1)
    assert cat.images[0].tobytes() != dog.images[0].tobytes()


def test_negative_prompts_go_with_their_prompts(painting: Painting) -> None:
    with painting.model.generate(**SEEDED) as tracer:
        with tracer.invoke(CAT, negative_prompt="dark"):
            cat = tracer.result.images.save()
        with tracer.invoke(DOG):
            dog = tracer.result.images.save()
    torch.testing.assert_close(cat[0], painting.image(CAT, 3, negative_prompt="dark"))
    torch.testing.assert_close(dog[0], painting.image(DOG, 4))


def test_one_negative_prompt_for_all(painting: Painting) -> None:
    with painting.model.generate([CAT, DOG], negative_prompt="dark", **SEEDED) as tracer:
        images = tracer.result.images.save()
    torch.testing.assert_close(images[1], painting.image(DOG, 4, negative_prompt="dark"))


def test_a_call_without_with_runs_at_once(painting: Painting) -> None:
    images = painting.model.generate(CAT, **SEEDED).images
    assert torch.equal(images[0], painting.image(CAT, 3))


def test_a_trace_runs_the_denoiser_once(painting: Painting) -> None:
    model = painting.model
    sample, text = torch.randn(3, 4, 8, 8), torch.randn(3, 16, 16)
    with torch.no_grad(), model.trace() as tracer:
        with tracer.invoke(sample[:1], 7, encoder_hidden_states=text[:1]):
            first = model.unet.output.sample.save()
        with tracer.invoke(sample[1:], 7, encoder_hidden_states=text[1:]):
            rest = model.output.sample.save()
    with torch.no_grad():
        expected = painting.plain.unet(sample, 7, encoder_hidden_states=text).sample
    torch.testing.assert_close(torch.cat([first, rest]), expected)
    torch.testing.assert_close(model(sample, 7, encoder_hidden_states=text).sample, expected)


def test_weights_come_with_the_first_run(painting: Painting) -> None:
    model = DiffusionModel(painting.path)
    before = model.dispatched, model.device
    with model.scan(torch.randn(1, 4, 8, 8), 7, encoder_hidden_states=torch.randn(1, 16, 16)):
        shape = model.unet.mid_block.output.shape.save()
    unet, scanned = model.unet, model.dispatched
    with model.generate(CAT, **SEEDED) as tracer:
        image = tracer.result.images.save()
    assert before == (False, torch.device("meta"))
    assert shape == (1, 16, 4, 4)
    assert not scanned
    assert model.unet is unet
    assert model.dispatched
    assert torch.equal(image[0], painting.image(CAT, 3))


def test_a_pipeline_can_be_wrapped(painting: Painting) -> None:
    model = DiffusionModel(painting.plain)
    assert model.dispatched
    assert model.repo_id == str(painting.path)
    assert model.unet._module is painting.plain.unet
    assert model.config is painting.plain.config


def test_parts_can_be_passed_along(painting: Painting) -> None:
    scheduler = diffusers.EulerDiscreteScheduler(steps_offset=1)
    model = DiffusionModel(painting.path, scheduler=scheduler, torch_dtype=torch.float16)
    assert model.unet.dtype == torch.float16
    model.dispatch()
    assert model.pipeline.scheduler is scheduler
    assert model.unet.dtype == torch.float16


def test_a_pipeline_without_prompts(tmp_path: Path) -> None:
    unet = diffusers.UNet2DModel(
        block_out_channels=(8, 16),
        layers_per_block=1,
        sample_size=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=4,
    )
    diffusers.DDPMPipeline(unet=unet, scheduler=diffusers.DDPMScheduler()).save_pretrained(tmp_path)
    model = DiffusionModel(tmp_path, automodel="DDPMPipeline")
    with model.generate(batch_size=2, num_inference_steps=STEPS, seed=0) as tracer:
        steps = save([len(model.unet.output.sample) for _ in tracer.iter[:]])
        images = tracer.result.images.save()
    assert steps == [2, 2]
    assert len(images) == 2


def test_each_image_has_a_generator_of_its_own() -> None:
    made = generators(5, 2)
    assert isinstance(made, list)
    assert [generator.initial_seed() for generator in made] == [5, 6]
    assert isinstance(generators(5, 1), torch.Generator)


def test_what_does_not_go_together_is_refused(painting: Painting) -> None:
    with (  # noqa: PT012 - a trace fails where its block ends
        pytest.raises(ValueError, match="num_inference_steps applies to all invokes"),
        painting.model.generate() as tracer,
    ):
        with tracer.invoke(CAT, num_inference_steps=1):
            pass
        with tracer.invoke(DOG, num_inference_steps=2):
            pass
    with pytest.raises(TypeError, match="not both"):
        painting.model.generate(CAT, seed=1, generator=torch.Generator())
    with pytest.raises(TypeError, match="a trace runs the model that denoises"), painting.model.trace(CAT):
        pass
    with pytest.raises(ValueError, match="got 'NoPipeline'"):
        DiffusionModel(painting.path, automodel="NoPipeline")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def without(name: str, *args: Any) -> Any:
        if name == "diffusers":
            raise ImportError("No module named 'diffusers'")
        return real(name, *args)

    monkeypatch.setattr(importlib, "import_module", without)
    with pytest.raises(ImportError, match=r"pip install nnsight-engine\[diffusion\]"):
        DiffusionModel("somewhere")
