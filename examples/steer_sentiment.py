"""Steer a served model towards a cheerful tone, through the HTTP API alone.

Captures the residual stream on cheerful and on gloomy sentences, takes the difference of the two
means as a direction, and adds it while the model writes. Prints what the model writes without
and with it, side by side, and what each layer would have said next (the logit lens).

Needs a running server (``make serve``) and ``pip install httpx numpy rich``; where the server has keys,
one in the variable ``NNSIGHT_ENGINE_KEY``:

    python examples/steer_sentiment.py --layer 15 --scale 0.2

The method is the difference of means, as in "Steering Llama 2 via Contrastive Activation
Addition" (Rimsky et al., 2023).
"""

from __future__ import annotations

import argparse
import base64
import dataclasses
import os
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import httpx
import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

Vector = npt.NDArray[np.float32]

CHEERFUL = (
    "I love this, it is wonderful and I am so happy.",
    "What a beautiful day, everything is perfect!",
    "This film is a masterpiece, I enjoyed every minute.",
    "The food was delicious and the people were kind.",
    "I am delighted with the result, great work!",
    "She smiled, full of joy and hope.",
)
GLOOMY = (
    "I hate this, it is horrible and I am so angry.",
    "What an awful day, everything is ruined!",
    "This film is a disaster, I suffered every minute.",
    "The food was disgusting and the people were rude.",
    "I am disappointed with the result, terrible work!",
    "She cried, full of pain and fear.",
)
PROMPTS = (
    "The restaurant we went to last night was",
    "I think this movie is",
    "When I woke up this morning I felt",
)
LENS_PROMPT = "The Eiffel Tower is in the city of"
TIMEOUT_S = 120.0
INTERRUPTED = 130
"""Exit status of what Ctrl-C ends."""


class ExampleError(Exception):
    """What the person who runs the example should read, without a traceback."""


class Server:
    """The few requests that the example makes.

    Args:
        base_url: Where the server listens, without ``/v1``.
        key: What it knows us by; empty where it has no keys.
    """

    def __init__(self, base_url: str, key: str = "") -> None:
        """Connect on the first request."""
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.Client(base_url=base_url, headers=headers, timeout=TIMEOUT_S)
        self._model = ""

    def __enter__(self) -> Self:
        """Ask for the model's name; raises ExampleError where no server answers."""
        self._model = str(self._request("GET", "/v1/models")["data"][0]["id"])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the connection."""
        self._client.close()

    def num_layers(self) -> int:
        """Return how many layers the model has."""
        return int(self._request("GET", "/v1/capabilities")["sizes"]["num_layers"])

    def complete(
        self, prompts: Sequence[str], interventions: list[dict[str, Any]], max_tokens: int
    ) -> list[dict[str, Any]]:
        """Return the choices, one per prompt, each with its ``interventions``."""
        body = {
            "model": self._model,
            "prompt": list(prompts),
            "max_tokens": max_tokens,
            "temperature": 0,
            "interventions": interventions,
        }
        choices: list[dict[str, Any]] = self._request("POST", "/v1/completions", body)["choices"]
        return sorted(choices, key=lambda choice: int(choice["index"]))

    def _request(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        try:
            response = self._client.request(method, path, json=body)
        except httpx.ReadTimeout as error:
            raise ExampleError(
                f"{self._client.base_url} took the request, and did not answer within {TIMEOUT_S:g} s; it "
                "may be busy"
            ) from error
        except httpx.TransportError as error:
            raise ExampleError(
                f"no server answers at {self._client.base_url} ({error}); start one with `make serve`, or "
                "name another with --base-url"
            ) from error
        try:
            answer: dict[str, Any] = response.json()
        except ValueError as error:
            raise ExampleError(
                f"{self._client.base_url} answered {response.status_code} without JSON; is this the server?"
            ) from error
        if response.is_error:
            refusal = answer.get("error", {})
            raise ExampleError(
                f"the server refused the request: {refusal.get('message', answer)} "
                f"(status {response.status_code}, code {refusal.get('code')})"
            )
        return answer


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """One prompt without and with steering.

    Attributes:
        prompt: The prompt.
        baseline: What follows without steering.
        steered: What follows with it.
        baseline_projection: How far the text that follows lies along the direction: the mean over
            its tokens of the residual stream's part along it.
        steered_projection: The same for the steered text, read before the vector is added there.
    """

    prompt: str
    baseline: str
    steered: str
    baseline_projection: float
    steered_projection: float


@dataclasses.dataclass(frozen=True, slots=True)
class LensRow:
    """What one layer would say next: a token and its probability."""

    layer: int
    token: str
    probability: float


@dataclasses.dataclass(frozen=True, slots=True)
class Lens:
    """The logit lens at the prompt's last token, and the token that the model then chose."""

    next_token: str
    rows: list[LensRow]


def capture_means(server: Server, sentences: Sequence[str], layer: int) -> Vector:
    """Return the mean over the sentences of the residual stream at their last token, ``[hidden]``."""
    point = f"layers.{layer}.output"
    capture = {
        "op": "capture",
        "at": point,
        "reduce": "last",
        "dtype": "float32",
        "where": {"phase": "prompt"},
        "name": "residual",
    }
    choices = server.complete(sentences, [capture], max_tokens=1)
    tensors = [_only_point(choice, "residual") for choice in choices]
    rows = [np.frombuffer(base64.b64decode(tensor["data"]), "<f4") for tensor in tensors]
    mean: Vector = np.mean(rows, axis=0, dtype=np.float32)
    return mean


def compare(
    server: Server, prompts: Sequence[str], direction: Vector, layer: int, scale: float, max_tokens: int
) -> list[Comparison]:
    """Write on from the prompts without and with the direction added at every position.

    Args:
        server: The server.
        prompts: What to write on from.
        direction: ``[hidden]``; only where it points to matters.
        layer: Whose output is changed.
        scale: How much is added, as a multiple of the residual stream's own norm.
        max_tokens: Tokens to write.
    """
    point = f"layers.{layer}.output"
    unit = (direction / np.linalg.norm(direction)).tolist()
    # Operations apply in order: the probe comes first, so it reads what the text alone brings.
    probe = {
        "op": "probe",
        "at": point,
        "weights": unit,
        "where": {"phase": "generated"},
        "name": "projection",
    }
    steer = {"op": "steer", "at": point, "vector": unit, "mode": "norm_match", "scale": scale}
    baseline = server.complete(prompts, [probe], max_tokens)
    steered = server.complete(prompts, [probe, steer], max_tokens)
    return [
        Comparison(prompt, plain["text"], moved["text"], _projection(plain), _projection(moved))
        for prompt, plain, moved in zip(prompts, baseline, steered, strict=True)
    ]


def read_lens(server: Server, prompt: str) -> Lens:
    """Return what every layer would say after the prompt, and what the model said."""
    lens = {
        "op": "logit_lens",
        "layers": "all",
        "top_k": 1,
        "where": {"positions": [-1]},
        "name": "lens",
    }
    (choice,) = server.complete([prompt], [lens], max_tokens=1)
    by_layer = choice["interventions"]["results"]["lens"]["layers"]
    rows = []
    for layer, positions in sorted(by_layer.items(), key=lambda item: int(item[0])):
        best = positions[0]["top"][0]
        rows.append(LensRow(int(layer), best["token"], float(np.exp(best["logprob"]))))
    return Lens(choice["text"], rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the example and return its exit status."""
    parser = argparse.ArgumentParser(
        description="Steer a served model towards a cheerful tone.",
        epilog="Where the server has keys, give one in the variable NNSIGHT_ENGINE_KEY.",
    )
    parser.add_argument("--base-url", default="http://127.0.0.1:8000", help="default: %(default)s")
    parser.add_argument("--layer", type=int, help="whose output is steered; default: the middle one")
    parser.add_argument(
        "--scale", type=float, default=0.2, help="multiple of the residual's norm; default: %(default)s"
    )
    parser.add_argument("--max-tokens", type=int, default=24, help="default: %(default)s")
    options = parser.parse_args(arguments)
    if options.max_tokens < 2:  # what is measured is the state at tokens that were written and read again
        parser.error(f"--max-tokens must be 2 or more, got {options.max_tokens}")
    try:
        with Server(options.base_url, os.environ.get("NNSIGHT_ENGINE_KEY", "")) as server:
            _run(server, options)
    except KeyboardInterrupt:
        return INTERRUPTED
    except ExampleError as error:
        Console(stderr=True).print(f"steer_sentiment: {error}", markup=False, highlight=False, soft_wrap=True)
        return 1
    return 0


def _run(server: Server, options: argparse.Namespace) -> None:
    console = Console()
    layer = server.num_layers() // 2 if options.layer is None else options.layer
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("Capturing cheerful sentences", total=4)
        cheerful = capture_means(server, CHEERFUL, layer)
        progress.update(task, advance=1, description="Capturing gloomy sentences")
        gloomy = capture_means(server, GLOOMY, layer)
        progress.update(task, advance=1, description="Writing without and with steering")
        comparisons = compare(
            server, PROMPTS, cheerful - gloomy, layer, options.scale, max_tokens=options.max_tokens
        )
        progress.update(task, advance=1, description="Reading the logit lens")
        lens = read_lens(server, LENS_PROMPT)
        progress.update(task, advance=1)
    console.print(_comparison_table(comparisons, layer, options.scale))
    console.print(_lens_table(lens))


def _projection(choice: dict[str, Any]) -> float:
    return float(np.mean(_only_point(choice, "projection")))


def _only_point(choice: dict[str, Any], name: str) -> Any:
    """Return what an operation read; the server names its point by the layer counted from 0."""
    (found,) = choice["interventions"]["results"][name]["points"].values()
    return found


def _comparison_table(comparisons: Sequence[Comparison], layer: int, scale: float) -> Table:
    table = Table(title=f"Steered at layers.{layer}.output, scale {scale:g}", show_lines=True)
    for column in ("prompt", "baseline", "steered", "along the direction"):
        table.add_column(column)
    for row in comparisons:
        moved = f"{row.baseline_projection:+.1f} → {row.steered_projection:+.1f}"
        table.add_row(*(_printable(text) for text in (row.prompt, row.baseline, row.steered)), moved)
    return table


def _lens_table(lens: Lens) -> Table:
    table = Table(title=f"{LENS_PROMPT} … {lens.next_token.strip()}")
    table.add_column("layer", justify="right")
    table.add_column("most likely next")
    table.add_column("probability", justify="right")
    for row in lens.rows:
        table.add_row(str(row.layer), _printable(repr(row.token)), f"{row.probability:.3f}")
    return table


def _printable(text: str) -> str:
    """Keep brackets in a model's text from being read as rich's markup."""
    return text.replace("[", r"\[")


if __name__ == "__main__":
    sys.exit(main())
