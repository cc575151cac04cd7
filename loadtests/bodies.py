"""Request bodies: distinct prompts, outputs of various lengths, and operations."""

from __future__ import annotations

import array
import base64
import json
import random
from typing import Any, Final

from loadtests.run_spec import Model

_FIRST_ID: Final = 100
_MAX_ID: Final = 40_000
_PROMPT_TOKENS: Final = 32
_LONG_PROMPT_TOKENS: Final = 768
_MAX_TOKENS: Final = (16, 48)
_FLOOD_TOKENS: Final = (32, 96)
_HUGE_BYTES: Final = 16 * 2**20

Operation = dict[str, Any]


class Bodies:
    """Creates the requests of one user.

    Args:
        model: The model.
        seed: Equal seeds yield equal requests.
    """

    def __init__(self, model: Model, seed: str) -> None:
        self._model = model
        self._chance = random.Random(seed)  # noqa: S311 - not for secrets
        self._same = _tensor(model.width, random.Random(0))  # noqa: S311 - the same for all users

    def prompt(self, num_tokens: int = _PROMPT_TOKENS) -> list[int]:
        """Return random token ids."""
        stop = min(_MAX_ID, self._model.vocab_size)
        first = min(_FIRST_ID, stop - 1)
        return [self._chance.randrange(first, stop) for _ in range(num_tokens)]

    def completion(self, *operations: Operation) -> bytes:
        """Return a streamed completion of a short prompt, with operations."""
        return self._streamed(self.prompt(), _MAX_TOKENS, operations)

    def long_prompt(self) -> bytes:
        """Return a completion of a long prompt, whose prefill delays other requests or is chunked."""
        room = self._model.max_model_len - _MAX_TOKENS[1] - 1
        return self._streamed(self.prompt(max(1, min(_LONG_PROMPT_TOKENS, room))), _MAX_TOKENS, ())

    def flood(self) -> bytes:
        """Return a completion as the hostile tenant sends in large numbers."""
        return self._streamed(self.prompt(), _FLOOD_TOKENS, ())

    def huge(self) -> bytes:
        """Return a body of 16 MiB that the model cannot serve: a long text, or very many ids."""
        # Not with the JSON encoder: its computation would block the other users of this process.
        text = b'"%b"' % (b"a " * (_HUGE_BYTES // 2))
        prompt = b"[%b1]" % (b"1," * (_HUGE_BYTES // 2)) if self.is_one_in(2) else text
        head = self._json({"model": self._model.name, "max_tokens": 1})
        return head[:-1] + b', "prompt": ' + prompt + b"}"

    def steer(self, *, is_same: bool) -> Operation:
        """Return an operation that adds a vector at the middle layer: the shared vector, or a new one."""
        vector = self._same if is_same else _tensor(self._model.width, self._chance)
        at = f"layers.{self._model.layer}.output"
        return {"op": "steer", "at": at, "vector": vector, "mode": "norm_match", "scale": 0.1}

    def lens(self) -> Operation:
        """Return an operation that reads the logit lens of all layers at the last position of the prompt."""
        return {"op": "logit_lens", "layers": "all", "top_k": 5, "where": {"positions": [-1]}, "name": "lens"}

    def capture(self) -> Operation:
        """Return an operation that captures the prompt's residual stream."""
        at = [f"layers.{self._model.layer}.output"]
        return {"op": "capture", "at": at, "where": {"phase": "prompt"}, "name": "residual"}

    def code(self) -> Operation:
        """Return an operation with code, which computes a norm for each generated token."""
        code = (
            "norms = save([])\n"
            "for _ in tracer.iter[:]:\n"
            f"    norms.append(model.layers[{self._model.layer}].output[-1].norm().item())"
        )
        return {"op": "trace", "name": "norms", "code": code}

    def endless(self) -> Operation:
        """Return an operation with code that never ends."""
        code = f"hidden = model.layers[{self._model.layer}].output\nwhile True:\n    hidden = hidden + 1"
        return {"op": "trace", "name": "endless", "code": code}

    def is_one_in(self, num: int) -> bool:
        """Return True with probability 1 / ``num``."""
        return not self._chance.randrange(num)

    def pause_s(self, min_s: float, max_s: float) -> float:
        """Return a random pause in seconds."""
        return self._chance.uniform(min_s, max_s)

    def _streamed(
        self, prompt: list[int], lengths: tuple[int, int], operations: tuple[Operation, ...]
    ) -> bytes:
        body = {
            "model": self._model.name,
            "prompt": prompt,
            "max_tokens": self._chance.randint(*lengths),
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return self._json(body | ({"interventions": list(operations)} if operations else {}))

    @staticmethod
    def _json(body: dict[str, Any]) -> bytes:
        return json.dumps(body).encode()


def _tensor(width: int, chance: random.Random) -> dict[str, Any]:
    numbers = array.array("f", (chance.gauss(0, 1) for _ in range(width)))
    data = base64.b64encode(numbers.tobytes()).decode()
    return {"dtype": "float32", "shape": [width], "data": data, "encoding": "base64"}


__all__ = ["Bodies", "Operation"]
