"""Operations over the images of a prompt equal transformers with hooks, in a real engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pytest
import torch
from PIL.Image import Image

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.points import VISION
from nnsight_engine.plans.collect.results import CollectedCapture, CollectedLens, CollectedProbe
from nnsight_engine.vllm_backend.request_parts import media_of
from tests.e2e.harness import Ask, Engine, Reply, random_vector, small_engine
from tests.e2e.seeing_reference import IMAGES, LAYER, NUM_TOKENS, TEXT, Change, SeeingReference
from tests.families.checkpoints import HIDDEN_SIZE, NUM_LAYERS
from tests.families.seeing import IMAGE_TOKEN, picture, write_idefics3

pytestmark = pytest.mark.e2e

AT: Final = f"layers.{LAYER}.output"
VECTOR: Final = random_vector(3, HIDDEN_SIZE)
SCALE: Final = 8


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> SeeingReference:
    return SeeingReference(write_idefics3(tmp_path_factory.mktemp("idefics3")))


@pytest.fixture(scope="module")
def engine(reference: SeeingReference) -> Iterator[Engine]:
    with small_engine(reference.checkpoint) as engine:
        yield engine


def steered(rows: torch.Tensor) -> torch.Tensor:
    return rows + SCALE * torch.tensor(VECTOR)


def ask(engine: Engine, *interventions: dict[str, Any], **fields: Any) -> Reply:
    given: dict[str, Any] = {"prompt": TEXT, "images": IMAGES, "max_tokens": NUM_TOKENS} | fields
    ((reply,),) = engine.run([Ask(interventions=list(interventions), **given)])
    assert reply.failure is None
    return reply


def assert_captured(reply: Reply, expected: dict[str, torch.Tensor]) -> None:
    result = reply.result("c")
    assert isinstance(result, CollectedCapture)
    for point in result.points:
        rows = expected[point][result.positions]
        torch.testing.assert_close(reply.tensor("c", point), rows, rtol=1e-3, atol=1e-4, msg=point)


CAPTURE: Final = {"op": "capture", "at": ["embed.output", "layers.*.output", "layers.*.attn.q"], "name": "c"}


def test_a_plain_answer_is_that_of_transformers(engine: Engine, reference: SeeingReference) -> None:
    assert ask(engine).token_ids == reference.generated()


def test_values_at_all_positions_are_those_of_transformers(
    engine: Engine, reference: SeeingReference
) -> None:
    reply = ask(engine, {**CAPTURE, "where": {"phase": "prompt"}})
    assert_captured(reply, reference.activations())


def test_images_name_their_positions(engine: Engine, reference: SeeingReference) -> None:
    first, second = reference.positions_by_image()
    for where, expected in (
        ({"images": [0]}, first),
        ({"images": [-1]}, second),
        ({"images": [1, 0]}, first + second),
        ({"images": [0, 1], "range": [0, second[0]]}, first),
        ({"images": [1], "positions": [0, second[2]]}, [second[2]]),
        ({"images": [0, 1], "exclude": {"images": [0]}}, second),
    ):
        result = ask(engine, {**CAPTURE, "where": where}).result("c")
        assert isinstance(result, CollectedCapture)
        assert result.positions == expected


def test_an_image_is_steered_as_in_transformers(engine: Engine, reference: SeeingReference) -> None:
    steer = {"op": "steer", "at": AT, "vector": VECTOR, "scale": SCALE, "where": {"images": [0, 1]}}
    expected = reference.generated(reference.image_positions(), steered)
    plain = ask(engine).token_ids
    assert expected != plain
    assert ask(engine, steer).token_ids == expected
    assert ask(engine).token_ids == plain, "what was steered is not read from the prefix cache"


def test_an_image_is_patched_by_another_one(engine: Engine, reference: SeeingReference) -> None:
    text, image, other = f"{IMAGE_TOKEN} the city", (IMAGES[0],), (picture(7),)
    capture = {**CAPTURE, "at": AT, "where": {"images": [0]}}
    rows = ask(engine, capture, prompt=text, images=other).tensor("c", AT)
    patch = {"op": "patch", "at": AT, "values": rows.tolist(), "where": {"images": [0]}}
    with reference.changing(reference.image_positions(text, image), lambda _: rows):
        expected = reference.model(**reference.inputs(text, image)).logits[0, -1]
    last = {"op": "capture", "at": "logits", "where": {"positions": [-1]}, "name": "c"}
    patched = ask(engine, patch, last, prompt=text, images=image).tensor("c", "logits")[0]
    plain = ask(engine, last, prompt=text, images=image).tensor("c", "logits")[0]
    torch.testing.assert_close(patched, expected, rtol=1e-3, atol=1e-4)
    assert (patched - plain).abs().max() > 0.01


def test_the_rows_of_images_are_read_and_written_alone(engine: Engine, reference: SeeingReference) -> None:
    def merged(image: Image) -> torch.Tensor:
        inputs = reference.inputs(f"{IMAGE_TOKEN} the city", (image,))
        pixels, mask = inputs["pixel_values"], inputs["pixel_attention_mask"]
        rows: torch.Tensor = reference.model.model.get_image_features(pixels, mask).pooler_output
        return rows.flatten(0, -2)

    read = {"op": "capture", "at": VISION, "name": "c"}
    text, images = f"{IMAGE_TOKEN} the city", (IMAGES[0],)
    rows = ask(engine, read, prompt=text, images=images)
    assert rows.result("c").positions == reference.image_positions(text, images)
    with torch.no_grad():
        torch.testing.assert_close(rows.tensor("c", VISION), merged(images[0]), rtol=1e-3, atol=1e-4)
        other = merged(picture(7))
    patch = {"op": "patch", "at": VISION, "values": other.tolist(), "where": {"images": [0]}}
    last = {"op": "capture", "at": "logits", "where": {"positions": [-1]}, "name": "c"}
    patched = ask(engine, patch, last, prompt=text, images=images).tensor("c", "logits")
    with torch.no_grad():
        expected = reference.model(**reference.inputs(text, (picture(7),))).logits[0, -1:]
    torch.testing.assert_close(patched, expected, rtol=1e-3, atol=1e-4)
    again = ask(engine, read, prompt=text, images=images).tensor("c", VISION)
    assert torch.equal(again, rows.tensor("c", VISION)), "the encoder's cache has what was encoded"


def test_the_lens_reads_images(engine: Engine, reference: SeeingReference) -> None:
    lens = {"op": "logit_lens", "layers": "all", "top_k": 1, "where": {"images": [1]}, "name": "c"}
    result = ask(engine, lens).result("c")
    assert isinstance(result, CollectedLens)
    values = reference.activations()
    for layer in range(NUM_LAYERS):
        with torch.no_grad():
            rows = reference.model.model.text_model.norm(values[f"layers.{layer}.output"][result.positions])
            expected = reference.model.lm_head(rows).argmax(dim=-1).tolist()
        assert result.layers[layer].ids[:, 0].tolist() == expected


def test_requests_with_the_same_text_and_other_images_share_nothing(engine: Engine) -> None:
    replies = [
        ask(engine, images=(picture(seed), picture(seed + 1)), sampling={"logprobs": 1})
        for seed in (10, 20, 10)
    ]
    first, other, again = (next(iter(reply.logprobs[0].values())) for reply in replies)
    assert first == pytest.approx(again, abs=1e-4)
    assert abs(first - other) > 1e-3
    assert replies[2].num_cached_tokens > replies[1].num_cached_tokens


def test_marks_between_the_parts_of_an_image_are_none_of_its_positions(engine: Engine) -> None:
    media = media_of(engine.rendered(Ask(TEXT, images=IMAGES)))
    assert len(media.images) == 2
    assert all(len(spans) > 1 and spans == tuple(sorted(spans)) for spans in media.images)


# Inside the vision encoder.

IN_ENCODER: Final = "vision.layers.1.output"
NUM_PATCHES: Final = 80
"""Patches of each of the images: five parts of 4 x 4."""
WIDTH: Final = 64
LAST_LOGITS: Final = {"op": "capture", "at": "logits", "where": {"positions": [-1]}, "name": "last"}


def test_blocks_of_the_encoder_return_what_those_of_transformers_do(
    engine: Engine, reference: SeeingReference
) -> None:
    text = f"{IMAGE_TOKEN} the city"
    read = {"op": "capture", "at": "vision.layers.*.output", "where": {"images": [0]}, "name": "c"}
    images = (*IMAGES, IMAGES[0])  # of the last two requests, one could be served with what another encoded
    asks = [Ask(text, [read], images=(image,), max_tokens=2) for image in images]
    asks.append(Ask(text, [read], images=(IMAGES[0],), cache_salt="another tenant", max_tokens=2))
    asks.append(Ask(text, images=(IMAGES[0],), max_tokens=2))
    expected = [reference.encoded(image) for image in (*images, IMAGES[0])]
    for _ in range(2):  # the second time, all of them are known
        *replies, plain = (reply for (reply,) in engine.run(asks))
        for reply, blocks in zip(replies, expected, strict=True):
            assert reply.result("c").positions == [*range(NUM_PATCHES)]
            for layer, rows in enumerate(blocks):
                own = reply.tensor("c", f"vision.layers.{layer}.output")
                torch.testing.assert_close(own, rows, rtol=0, atol=1e-4)
        assert plain.token_ids == replies[0].token_ids
    assert engine.held()["captured_bytes"] == 0


def test_rows_of_images_in_the_encoder_are_numbered_over_the_prompt(
    engine: Engine, reference: SeeingReference
) -> None:
    rows = reference.encoded(*IMAGES)[1]
    reads: list[dict[str, Any]] = [
        {"op": "capture", "at": IN_ENCODER, "where": {"images": [-1]}, "name": "second"},
        {"op": "capture", "at": IN_ENCODER, "reduce": "mean", "name": "mean"},
        {"op": "capture", "at": IN_ENCODER, "reduce": "last", "dtype": "float16", "name": "end"},
        {"op": "probe", "at": IN_ENCODER, "weights": [1.0] * WIDTH, "where": {"images": [0]}, "name": "sums"},
    ]
    (choices,) = engine.run([Ask(TEXT, reads, images=IMAGES, sampling={"n": 2, "temperature": 1})])
    for reply in choices:
        assert reply.result("second").positions == [*range(NUM_PATCHES, 2 * NUM_PATCHES)]
        for name, own, atol in (
            ("second", rows[NUM_PATCHES:], 1e-4),
            ("mean", rows.mean(dim=0), 1e-4),
            ("end", rows[-1], 1e-2),
        ):
            torch.testing.assert_close(reply.tensor(name, IN_ENCODER), own, rtol=0, atol=atol)
        sums = reply.result("sums")
        assert isinstance(sums, CollectedProbe)
        numbers = torch.tensor(sums.points[IN_ENCODER])
        torch.testing.assert_close(numbers, rows[:NUM_PATCHES].sum(dim=1), rtol=0, atol=1e-3)
        assert reply.collected is not None
        assert reply.collected.applied[0].positions == reply.result("second").positions


def edited(rows: torch.Tensor, image: int, new: torch.Tensor) -> torch.Tensor:
    rows[image * NUM_PATCHES : (image + 1) * NUM_PATCHES] = new
    return rows


def meant(rows: torch.Tensor) -> torch.Tensor:
    for image in (0, 1):
        own = rows[image * NUM_PATCHES : (image + 1) * NUM_PATCHES]
        rows = edited(rows, image, own.mean(dim=0).expand_as(own))
    return rows


def test_writes_in_the_encoder_are_those_of_transformers_and_change_one_request(
    engine: Engine, reference: SeeingReference
) -> None:
    vector = torch.tensor(random_vector(5, WIDTH))
    other = reference.encoded(picture(7))[1]
    cases: list[tuple[dict[str, Any], Change]] = [
        (
            {"op": "steer", "vector": vector.tolist(), "scale": 3, "where": {"images": [1]}},
            lambda rows: edited(rows, 1, rows[NUM_PATCHES:] + 3 * vector),
        ),
        (
            {"op": "ablate", "units": [0, 7]},
            lambda rows: rows.index_fill(1, torch.tensor([0, 7]), 0.0),
        ),
        ({"op": "ablate", "method": "mean"}, meant),
        (
            {"op": "patch", "values": other.tolist(), "where": {"images": [0]}},
            lambda rows: edited(rows, 0, other),
        ),
    ]
    plain = Ask(TEXT, [LAST_LOGITS], images=IMAGES, max_tokens=1)
    asks = [
        Ask(TEXT, [{"at": IN_ENCODER, **operation}, LAST_LOGITS], images=IMAGES, max_tokens=1)
        for operation, _ in cases
    ]
    unchanged = reference.last_logits(1, lambda rows: rows)
    for _ in range(2):  # the second time, keys and values of the same writes are known
        *replies, before, after = (reply for (reply,) in engine.run([*asks, plain, plain]))
        for reply, (_, change) in zip(replies, cases, strict=True):
            expected = reference.last_logits(1, change)
            assert (expected - unchanged).abs().max() > 0.01
            torch.testing.assert_close(reply.tensor("last", "logits")[0], expected, rtol=1e-3, atol=1e-4)
        for reply in (before, after):
            torch.testing.assert_close(reply.tensor("last", "logits")[0], unchanged, rtol=1e-3, atol=1e-4)


def test_the_same_write_in_the_encoder_shares_keys_and_values(
    engine: Engine, reference: SeeingReference
) -> None:
    steer = {"op": "steer", "at": IN_ENCODER, "vector": random_vector(5, WIDTH), "scale": 3}
    plain = ask(engine).token_ids
    first, second = ask(engine, steer), ask(engine, steer)
    assert first.token_ids != plain
    assert (second.token_ids, second.num_cached_tokens > 0) == (first.token_ids, True)
    swapped = ask(engine, steer, images=IMAGES[::-1])
    assert swapped.num_cached_tokens < second.num_cached_tokens
    assert ask(engine).token_ids == plain == reference.generated()


def test_reads_in_the_encoder_see_earlier_writes(engine: Engine, reference: SeeingReference) -> None:
    rows = reference.encoded(IMAGES[0])[1]
    reply = ask(
        engine,
        {"op": "capture", "at": IN_ENCODER, "name": "before"},
        {"op": "ablate", "at": IN_ENCODER, "method": "vector", "vector": [2.0] * WIDTH},
        {"op": "capture", "at": IN_ENCODER, "name": "after"},
        prompt=f"{IMAGE_TOKEN} the city",
        images=(IMAGES[0],),
    )
    torch.testing.assert_close(reply.tensor("before", IN_ENCODER), rows, rtol=0, atol=1e-4)
    assert torch.equal(reply.tensor("after", IN_ENCODER), torch.full_like(rows, 2.0))


RANGE, MIXED = ErrorCode.POSITION_OUT_OF_RANGE, ErrorCode.UNSUPPORTED_COMBINATION


@pytest.mark.parametrize(
    ("operation", "images", "code", "param"),
    [
        ({"at": AT, "where": {"images": [2]}}, IMAGES, RANGE, "where.images.0"),
        ({"at": AT, "where": {"images": [-3]}}, IMAGES, RANGE, "where.images.0"),
        ({"at": AT, "where": {"images": [0]}}, (), RANGE, "where.images.0"),
        (
            {"at": AT, "where": {"images": [0], "phase": "generated"}},
            IMAGES,
            ErrorCode.CONTRADICTORY_WHERE,
            "where",
        ),
        ({"at": VISION}, (), RANGE, "at"),
        ({"at": [VISION, AT]}, IMAGES, MIXED, "at"),
        (
            {"at": VISION, "where": {"phase": "generated"}},
            IMAGES,
            ErrorCode.CONTRADICTORY_WHERE,
            "where",
        ),
        ({"at": IN_ENCODER}, (), RANGE, "at"),
        ({"at": IN_ENCODER, "where": {"images": [2]}}, IMAGES, RANGE, "where.images.0"),
        ({"at": [IN_ENCODER, VISION]}, IMAGES, MIXED, "at"),
        ({"at": IN_ENCODER, "where": {"positions": [0]}}, IMAGES, MIXED, "where"),
        (
            {"at": IN_ENCODER, "where": {"phase": "generated"}},
            IMAGES,
            ErrorCode.CONTRADICTORY_WHERE,
            "where.phase",
        ),
        ({"at": "vision.layers.3.output"}, IMAGES, ErrorCode.UNKNOWN_LAYER, "at"),
        ({"at": "vision.layers.0.mlp.act"}, IMAGES, ErrorCode.UNKNOWN_POINT, "at"),
        (
            {"op": "patch", "at": IN_ENCODER, "values": [[0.0] * WIDTH], "where": {"images": [0]}},
            IMAGES,
            ErrorCode.INVALID_VALUE,
            "values",
        ),
    ],
)
def test_what_is_not_in_an_image_is_refused(
    engine: Engine, operation: dict[str, Any], images: tuple[Image, ...], code: ErrorCode, param: str
) -> None:
    with pytest.raises(ApiError) as caught:
        ask(engine, {"op": "capture", **operation}, images=images)
    assert (caught.value.code, caught.value.param) == (code, f"interventions.0.{param}")


def test_an_image_of_a_refused_request_is_processed_again_and_then_cached(engine: Engine) -> None:
    prompt, images = f"{IMAGE_TOKEN} the city", (picture(77),)

    def is_sent() -> bool:
        (item,) = engine.rendered(Ask(prompt, images=images))["mm_kwargs"]["image"]
        return item is not None

    with pytest.raises(ApiError):
        ask(engine, {"op": "capture", "at": AT, "where": {"images": [1]}}, prompt=prompt, images=images)
    assert is_sent()
    assert is_sent()
    ask(engine, prompt=prompt, images=images)
    assert not is_sent()
    ask(engine, prompt=prompt, images=images)


# Last, since its engine ends what the others' needs.


def test_chunks_of_an_image_are_as_the_whole_and_preempted_prompts_read_once(
    reference: SeeingReference,
) -> None:
    options = {"max_num_batched_tokens": 24, "max_num_seqs": 4, "num_gpu_blocks_override": 12}
    with small_engine(reference.checkpoint, **options) as engine:
        reply = ask(engine, {**CAPTURE, "where": {"phase": "prompt"}})
        assert_captured(reply, reference.activations())
        steer = {"op": "steer", "at": AT, "vector": VECTOR, "scale": SCALE, "where": {"images": [1]}}
        tokens = ask(engine, steer).token_ids
        read = {"op": "capture", "at": IN_ENCODER, "name": "c"}
        together = engine.run([Ask(TEXT, [read], images=IMAGES, max_tokens=64)] * 4)
    for (reply,) in together:
        whole = reply.tensor("c", IN_ENCODER)
        torch.testing.assert_close(whole, reference.encoded(*IMAGES)[1], rtol=0, atol=1e-4)
    assert any(reply.collected and reply.collected.recomputed_tokens for (reply,) in together)
    _, second = reference.positions_by_image()
    assert tokens == reference.generated(second, steered)
