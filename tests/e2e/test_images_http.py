"""Images in requests over HTTP: operations on their positions, on each route, and what is refused."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from typing import Any, Final

import httpx
import numpy as np
import pytest
import torch
from PIL import Image

from tests.e2e.answers import tensor_of
from tests.e2e.keyed import keys_in
from tests.e2e.seeing_reference import IMAGES, LAYER, NUM_TOKENS, TEXT, SeeingReference
from tests.e2e.server import Server
from tests.families.checkpoints import HIDDEN_SIZE
from tests.families.seeing import IMAGE_TOKEN, picture, write_idefics3
from tests.unit.app.test_media import claimed_png

pytestmark = [pytest.mark.e2e, pytest.mark.heavy]

AT: Final = f"layers.{LAYER}.output"
VECTOR: Final = [float(index % 7) for index in range(HIDDEN_SIZE)]
CAPTURE: Final = {"op": "capture", "at": AT, "where": {"images": [0]}, "name": "c", "dtype": "float32"}
CHAT: Final = "/v1/chat/completions"


class Seeing:
    def __init__(self, server: Server, keys: list[str], reference: SeeingReference) -> None:
        self.reference = reference
        self.clients = [
            httpx.Client(base_url=server.base_url, timeout=60, headers={"Authorization": f"Bearer {key}"})
            for key in keys
        ]

    def post(self, path: str, *, client: int = 0, **body: Any) -> httpx.Response:
        return self.clients[client].post(path, json={"model": "tiny"} | body)

    def chat(self, content: list[dict[str, Any]], **body: Any) -> httpx.Response:
        asked = {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        return self.post(CHAT, messages=[{"role": "user", "content": content}], **(asked | body))


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seeing]:
    folder = tmp_path_factory.mktemp("seeing")
    reference = SeeingReference(write_idefics3(folder / "idefics3"))
    data = folder / "data"
    keys = [*keys_in(data, acme=(), rival=()).values()]
    arguments = ["--served-model-name", "tiny", "--dtype", "float32", "--max-model-len", "256"]
    environment = {"NNSIGHT_ENGINE_DATA_DIR": str(data)}
    with Server(str(folder / "idefics3"), arguments=arguments, environment=environment) as server:
        yield Seeing(server, keys, reference)


def data_url(image: Image.Image) -> str:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def image_part(url: str, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}, **fields}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def two_images() -> list[dict[str, Any]]:
    texts = TEXT.split(IMAGE_TOKEN)
    urls = [image_part(data_url(image)) for image in IMAGES]
    return [text_part(texts[0]), urls[0], text_part(texts[1]), urls[1], text_part(texts[2])]


RENDERED: Final = f"user: {TEXT}\nassistant:"


def steered(rows: torch.Tensor) -> torch.Tensor:
    return rows + 3 * torch.tensor(VECTOR)


def first_image(seeing: Seeing) -> list[int]:
    ids = seeing.reference.inputs(RENDERED, IMAGES)["input_ids"][0].tolist()
    word = ids.index(seeing.reference.processor.tokenizer.encode(" Rome")[0])
    return [one for one in seeing.reference.image_positions(RENDERED) if one < word]


def value_of(link: dict[str, Any]) -> torch.Tensor:
    return torch.tensor(tensor_of(link))


def results_of(answer: httpx.Response, *, stream: bool) -> dict[str, Any]:
    """Return the results of an answer's only choice, of whichever frame of a stream has them."""
    if not stream:
        found: dict[str, Any] = answer.json()["choices"][0]["interventions"]["results"]
        return found
    frames = [frame.removeprefix("data: ") for frame in answer.text.split("\n\n")]
    parts = [json.loads(frame) for frame in frames if frame.startswith("{")]
    of_parts = [choice.get("interventions", {}) for part in parts for choice in part["choices"]]
    return {name: one for part in of_parts for name, one in part.get("results", {}).items()}


def test_an_image_is_steered_captured_and_named_in_the_answer(seeing: Seeing) -> None:
    positions = first_image(seeing)
    steer = {"op": "steer", "at": AT, "vector": VECTOR, "scale": 3, "where": {"images": [0]}}
    answer = seeing.chat(two_images(), interventions=[CAPTURE, steer], n=2, temperature=1, top_k=1).json()
    expected = seeing.reference.generated(positions, steered, text=RENDERED)
    assert expected != seeing.reference.generated(text=RENDERED)
    rows = seeing.reference.activations(RENDERED)[AT][positions]
    for choice in answer["choices"]:
        assert choice["token_ids"] == expected
        found = choice["interventions"]
        assert found["applied"][1]["positions"] == found["results"]["c"]["positions"] == positions
        torch.testing.assert_close(value_of(found["results"]["c"]["points"][AT]), rows, rtol=1e-3, atol=1e-4)
        by_image = [[one for span in spans for one in range(*span)] for spans in found["images"]]
        assert by_image[0] == positions
        assert [*by_image[0], *by_image[1]] == seeing.reference.image_positions(RENDERED)


def test_a_stream_names_the_images_at_its_end(seeing: Seeing) -> None:
    frames = seeing.chat(two_images(), interventions=[CAPTURE], stream=True).text.split("\n\n")
    told = [frame for frame in frames if '"images"' in frame]
    assert len(told) == 1
    assert '"provenance"' in told[0]


def test_images_larger_than_a_text_may_be_are_taken_by_all_routes(seeing: Seeing) -> None:
    pixels = np.random.default_rng(1).integers(0, 255, (128, 128, 3), dtype=np.uint8)
    url = data_url(Image.fromarray(pixels))
    chat = seeing.chat([image_part(url), text_part(" good")], interventions=[CAPTURE], max_tokens=1).json()
    positions = chat["choices"][0]["interventions"]["results"]["c"]["positions"]
    parts = [
        {"type": "input_image", "image_url": url, "detail": "auto"},
        {"type": "input_text", "text": " good"},
    ]
    turn = {"role": "user", "content": parts}
    response = seeing.post("/v1/responses", input=[turn], max_output_tokens=1, interventions=[CAPTURE])
    source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    content = [{"type": "image", "source": source}, text_part(" good")]
    message = seeing.post(
        "/v1/messages",
        messages=[{"role": "user", "content": content}],
        max_tokens=1,
        interventions=[CAPTURE],
    )
    for answer in (response.json(), message.json()):
        found = answer["interventions"]
        assert found["results"]["c"]["positions"] == positions
        assert [one for span in found["images"][0] for one in range(*span)] == positions


def test_each_tenant_names_and_reads_an_image_of_its_own(seeing: Seeing) -> None:
    at = "vision.layers.0.output"
    points = {one["name"]: one for one in seeing.clients[0].get("/v1/capabilities").json()["points"]}
    assert points["vision.layers.*.output"]["layers"] == [0, 1, 2]
    assert {"vision.output", "embed.output"} <= points.keys()
    read = {"op": "capture", "at": at, "where": {"images": [0]}, "name": "c", "dtype": "float32"}
    named = image_part(data_url(picture(8)), uuid="dog")
    again = {"type": "image_url", "image_url": None, "uuid": "dog"}
    (rows, *_) = seeing.reference.encoded(picture(8))
    for part, client, status in ((named, 0, 200), (again, 0, 200), (again, 1, 400), (named, 1, 200)):
        for stream in (False, True):
            body = {"interventions": [read], "max_tokens": 2, "stream": stream, "temperature": 0}
            turn = {"role": "user", "content": [part, text_part(" good")]}
            answer = seeing.post(CHAT, client=client, messages=[turn], **body)
            assert answer.status_code == status
            if status != 200:
                assert "Cache miss" in answer.json()["error"]["message"]
                continue
            found = results_of(answer, stream=stream)["c"]
            assert found["positions"] == [*range(len(rows))]
            torch.testing.assert_close(value_of(found["points"][at]), rows, rtol=0, atol=1e-4)


BOMB: Final = f"data:image/png;base64,{base64.b64encode(claimed_png(60_000, 60_000)).decode()}"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://127.0.0.1:9/x.png", "--allowed-media-domains"),
        ("HTTPS://127.0.0.1:9/x.png", "--allowed-media-domains"),
        ("file:///etc/passwd", "--allowed-local-media-path"),
        ("data:image/png;base64,AAAA", "cannot identify image"),
        (BOMB, "cannot be decoded (DecompressionBombError: Image size (3600000000 pixels)"),
    ],
    ids=["http", "https", "file", "broken", "bomb"],
)
def test_media_from_elsewhere_and_broken_ones_are_refused_by_all_routes(
    seeing: Seeing, url: str, message: str
) -> None:
    turns = [{"role": "user", "content": [image_part(url)]}]
    source = {"type": "url", "url": url}
    if url.startswith("data:"):
        source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    shown = [{"role": "user", "content": [{"type": "image", "source": source}]}]
    seen = [{"role": "user", "content": [{"type": "input_image", "image_url": url, "detail": "auto"}]}]
    bodies: dict[str, dict[str, Any]] = {
        CHAT: {"messages": turns},
        "/tokenize": {"messages": turns},
        "/v1/responses": {"input": seen, "max_output_tokens": 1},
        "/v1/messages": {"messages": shown, "max_tokens": 1},
        "/v1/messages/count_tokens": {"messages": shown},
    }
    for path, body in bodies.items():
        for stream in {False, "count" not in path and path != "/tokenize"}:
            answer = seeing.post(path, **body, **({"stream": True} if stream else {}))
            assert (path, answer.status_code) == (path, 400), answer.text
            assert message in answer.json()["error"]["message"]


def test_images_that_would_fill_the_memory_are_refused(seeing: Seeing) -> None:
    answer = seeing.chat([image_part(data_url(Image.new("1", (2**13, 2**13))))])
    assert answer.status_code == 400
    assert "exceed the maximum" in answer.json()["error"]["message"]
    answer = seeing.chat([image_part(data_url(picture(1)))] * 9)
    assert answer.status_code == 400
    assert "At most 8 image(s)" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "refused",
    [
        {"interventions": [{"op": "capture", "at": AT, "where": {"images": [1]}}]},
        {"structured_outputs": {"regex": "("}},
        {"max_tokens": 1000},
        {"logprobs": True, "top_logprobs": 1000},
        {"vllm_xargs": {"nnsight_engine": 1}},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_an_image_of_a_refused_request_is_served_to_the_next(
    seeing: Seeing, refused: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    image = Image.effect_noise((32, 32), 50 + len(request.node.name)).convert("RGB")
    content = [image_part(data_url(image)), text_part(" good")]
    assert seeing.chat(content, **refused).status_code in {400, 422}
    for client in (1, 0):
        answer = seeing.post(CHAT, messages=[{"role": "user", "content": content}], client=client)
        assert answer.status_code == 200, answer.text
