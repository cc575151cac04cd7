"""Random cases: requests that meet on one engine, as JSON, so that a failing one can be kept and sent again.

A case begins with an empty prefix cache. Its prompts share beginnings, some repeat what others write, some
come while others run and some leave early, and at its end plain requests come back to every prompt: whatever
an intervention has left behind, in the batch or in the cache, they meet.
"""

from __future__ import annotations

import random
from typing import Final

from tests.e2e.fuzz import wording
from tests.e2e.fuzz.clauses import Clauses
from tests.e2e.fuzz.world import Json, World

DTYPES: Final = ("float32", "bfloat16", "float16")
AFTER_ALL: Final = 1_000_000
"""The arrival of a request that waits until all before it have ended."""
_SALTS: Final = ("salt", "another salt")
_FORMS: Final = ("numbers", "float32", "bfloat16", "float16")


class Author:
    """Writes cases, the same ones for the same seed."""

    def __init__(self, world: World, seed: int) -> None:
        self._world = world
        self._random = random.Random(seed)
        self._clauses = Clauses(world, self._random)

    def case(self) -> list[Json]:
        pick = self._random
        bases = [
            self._tokens(pick.randint(8, self._world.max_prompt - 12)) for _ in range(pick.randint(1, 3))
        ]
        requests: list[Json] = []
        for _ in range(pick.randint(3, 9)):
            again = self._again(requests) if pick.random() < 0.15 else None
            requests.append(again or self._request(self._prompt(bases), requests))
        prompts = [request["ids"] for request in requests]
        last = [*bases, pick.choice(prompts)]
        return requests + [self._plain(ids) | {"arrives": AFTER_ALL + pick.randint(0, 1)} for ids in last]

    def _tokens(self, length: int) -> list[int]:
        return [self._random.choice(self._world.vocab) for _ in range(length)]

    def _prompt(self, bases: list[list[int]]) -> list[int]:
        pick = self._random
        base = pick.choice(bases)
        kept = len(base) if pick.random() < 0.6 else pick.randint(2, len(base))
        return base[:kept] + self._tokens(pick.choice([0, 0, 1, 3, 10]))

    def _plain(self, ids: list[int]) -> Json:
        return {
            "ids": ids,
            "interventions": [],
            "max_tokens": self._random.randint(1, 6),
            "sampling": {"logprobs": 2},
        }

    def _request(self, ids: list[int], before: list[Json]) -> Json:
        pick = self._random
        request = self._plain(ids) | {"arrives": pick.choice([0, 0, 0, pick.randint(1, 25), AFTER_ALL])}
        request["max_tokens"] = pick.choice([1, 2, 5, self._world.max_generated, self._world.max_generated])
        request["sampling"] = self._sampling()
        if pick.random() < 0.25:
            request["cache_salt"] = pick.choice(_SALTS)
        if pick.random() < 0.08:
            request["leaves"] = pick.randint(1, 12)
        if pick.random() < 0.3:
            return request
        if pick.random() < 0.15:
            return self._traced(request)
        request["stream"] = pick.random() < 0.25
        writes = self._writes(request, before)
        reads = [self._read(request, index) for index in range(pick.choice([0, 1, 1, 2, 3]))]
        operations = writes + reads
        if pick.random() < 0.8:
            # Writes keep their order, by which requests that write alike find each other's cache.
            for read in reads:
                operations.remove(read)
                operations.insert(pick.randint(0, len(operations)), read)
        request["interventions"] = operations
        return request

    def _again(self, before: list[Json]) -> Json | None:
        """Return a request that writes as one before it on its prompt, perhaps with another salt."""
        pick = self._random
        writers = [r for r in before if "trace" not in r and any(map(wording.is_write, r["interventions"]))]
        if not writers:
            return None
        first = pick.choice(writers)
        writes = [op for op in first["interventions"] if wording.is_write(op)]
        salt = pick.choice([None, *_SALTS])
        arrives = pick.choice([first["arrives"] + pick.randint(1, 8), AFTER_ALL])
        return (
            self._plain(first["ids"])
            | {"interventions": writes, "max_tokens": first["max_tokens"], "arrives": arrives}
            | ({} if salt is None else {"cache_salt": salt})
        )

    def _traced(self, request: Json) -> Json:
        """Make a request one of a block: operations at all positions, in the order of the model."""
        pick = self._random
        leaves = ("attn.output", "mlp.output", "output")
        places = [(layer, leaf) for layer in range(self._world.num_layers) for leaf in leaves]
        chosen = sorted(pick.sample(range(len(places)), pick.randint(1, 5)))
        operations: list[Json] = []
        for number, (layer, leaf) in enumerate(places[index] for index in chosen):
            op: Json = {"op": pick.choice(["capture", "steer", "ablate"]), "at": f"layers.{layer}.{leaf}"}
            if op["op"] == "capture":
                op["name"] = f"read {number}"
            elif op["op"] == "steer":
                op |= {"vector": self._vector(leaf, 1), "scale": pick.choice([1.0, -0.5])}
            operations.append(op | ({} if op["op"] == "capture" else {"in_place": pick.random() < 0.5}))
        request["sampling"].pop("n", None)
        request.pop("leaves", None)
        request.pop("cache_salt", None)
        return request | {"interventions": operations, "trace": True}

    def _sampling(self) -> Json:
        pick = self._random
        sampling: Json = {"logprobs": pick.choice([1, 4])} if pick.random() < 0.6 else {}
        if pick.random() < 0.25:
            sampling |= {"temperature": 1.0, "seed": pick.randint(0, 9999), "n": pick.choice([1, 1, 2, 3])}
        if pick.random() < 0.12:
            sampling["prompt_logprobs"] = pick.choice([0, 1, 3])
        if pick.random() < 0.15:
            sampling["stop_token_ids"] = pick.sample(self._world.vocab, len(self._world.vocab) // 8)
        return sampling

    def _writes(self, request: Json, before: list[Json]) -> list[Json]:
        pick = self._random
        others = [r for r in before if "trace" not in r and any(map(wording.is_write, r["interventions"]))]
        if others and pick.random() < 0.35:
            return [op for op in pick.choice(others)["interventions"] if wording.is_write(op)]
        return [self._write(request) for _ in range(pick.choice([0, 1, 1, 1, 2, 3]))]

    def _write(self, request: Json) -> Json:
        kind = self._random.choice(["steer", "steer", "steer", "ablate", "ablate", "patch"])
        leaf = self._leaf()
        at, num_points = self._alike(leaf)
        op: Json = {"op": kind, "at": at}
        if kind == "patch":
            return op | self._patch(request, leaf, num_points)
        op |= self._steer(leaf, num_points) if kind == "steer" else self._ablate(leaf, num_points)
        return self._with_where(op, request)

    def _leaf(self) -> str:
        """Return a leaf, the residual stream as often as all others."""
        leaf: str = self._random.choice(
            ["output", "output", "input", self._random.choice(list(self._world.widths))]
        )
        return leaf if leaf in self._world.widths else "output"

    def _alike(self, leaf: str) -> tuple[str | list[str], int]:
        """Return one point or several of one width, as ``at`` has them, and their number."""
        pick, layers = self._random, self._world.num_layers
        if self._world.at(leaf, 0) == leaf:
            return leaf, 1
        start, stop = sorted(pick.sample(range(layers + 1), 2))
        chosen = pick.sample(range(layers), min(2, layers))
        forms: list[tuple[str | list[str], int]] = [
            (f"layers.{pick.randrange(layers)}.{leaf}", 1),
            (f"layers.{pick.randrange(layers)}.{leaf}", 1),
            (f"layers.{-pick.randint(1, layers)}.{leaf}", 1),
            (f"layers.{start}:{stop}.{leaf}", stop - start),
            ([f"layers.{layer}.{leaf}" for layer in chosen], len(chosen)),
            (f"layers.*.{leaf}", layers),
        ]
        return pick.choice(forms)

    def _vector(self, leaf: str, num_points: int, *more: int, norm: float | None = None) -> Json:
        pick = self._random
        width = self._world.widths[leaf]
        rows = [num_points] if pick.random() < 0.4 else []
        norm = self._world.norms[leaf] * pick.uniform(0.5, 1.5) if norm is None else norm
        return {
            "normal": pick.randrange(2**31),
            "shape": [*rows, *more, width],
            "norm": round(norm, 3),
            "as": pick.choice(_FORMS),
        }

    def _steer(self, leaf: str, num_points: int) -> Json:
        pick, norm = self._random, self._world.norms[leaf]
        mode = pick.choice(["add", "add", "norm_match", "project_out", "clamp", "affine", "replace"])
        op = {"mode": mode, **self._directions(leaf, num_points, mode)}
        if mode == "affine":
            gain, offset = pick.choice([-1.0, 0.0, 2.0]), round(norm * pick.uniform(-1.0, 1.0), 3)
            return op | pick.choice([{"gain": gain}, {"offset": offset}, {"gain": gain, "offset": offset}])
        if mode == "clamp" and pick.random() < 0.5:
            low, high = sorted(round(norm * pick.uniform(-0.6, 0.6), 3) for _ in range(2))
            return op | pick.choice([{"low": low}, {"high": high}, {"low": low, "high": high}])
        scale = {
            "norm_match": pick.uniform(0.3, 1.0),
            "project_out": pick.choice([1.0, 2.0]),
            "clamp": norm * pick.uniform(0.4, 1.0),
        }.get(mode, pick.choice([0.5, 1.0, 1.5]))
        return op | {"scale": round(scale * pick.choice([1, -1]), 3) if mode != "project_out" else scale}

    def _directions(self, leaf: str, num_points: int, mode: str) -> Json:
        """Return the vector of a steer, or several; those of a span may be dependent."""
        pick = self._random
        if pick.random() < 0.6:
            return {"vector": self._vector(leaf, num_points)}
        number = pick.randint(1, min(4, self._world.widths[leaf]))
        vectors: list[Json] = [{"vector": self._vector(leaf, num_points)} for _ in range(number)]
        if mode != "project_out":
            for one in vectors:
                one["weight"] = pick.choice([1, 0.5, -1])
        elif number < self._world.widths[leaf] and pick.random() < 0.3:
            vectors.append(vectors[0])
        return {"vectors": vectors}

    def _ablate(self, leaf: str, num_points: int) -> Json:
        pick, width = self._random, self._world.widths[leaf]
        op: Json = {"method": pick.choice(["zero", "mean", "vector"])}
        if op["method"] == "vector":
            op["vector"] = self._vector(leaf, num_points)
        if pick.random() < 0.5:
            op["units"] = pick.sample(range(width), pick.randint(width // 4, width))
        return op

    def _patch(self, request: Json, leaf: str, num_points: int) -> Json:
        positions = self._clauses.positions(request)
        return {"values": self._vector(leaf, num_points, len(positions)), "where": {"positions": positions}}

    def _read(self, request: Json, index: int) -> Json:
        pick = self._random
        kind = pick.choice(["capture", "capture", "capture", "probe", "logit_lens", "samples", "pattern"])
        name = {"name": f"read {index}"}
        match kind:
            case "probe":
                leaf = self._leaf()
                at, num_points = self._alike(leaf)
                weights = self._vector(leaf, num_points, norm=pick.choice([0.1, 1.0, 10.0]))
                op = {"op": "probe", "at": at, "weights": weights, "bias": pick.choice([0.0, -2.5]), **name}
            case "logit_lens":
                op = {"op": "logit_lens", **self._lens(), **name}
            case "samples":
                where = pick.choice([{"positions": [-1]}, {"range": [-1, None]}])
                return {"op": "capture", "at": "samples", "where": where, **name}
            case "pattern":
                at, _ = self._alike("attn.pattern")
                op = {"op": "capture", "at": at, "reduce": pick.choice(["none", "last"]), **name}
            case _:
                op = {
                    "op": "capture",
                    "at": self._points(),
                    "reduce": pick.choice(["none", "none", "mean", "last"]),
                    **name,
                }
        if op["op"] == "capture" and pick.random() < 0.75:
            op["dtype"] = pick.choice(DTYPES)
        return self._with_where(op, request)

    def _points(self) -> str | list[str]:
        """Return points of any widths, no place twice."""
        if self._random.random() < 0.6:
            return self._alike(self._leaf())[0]
        names = [
            self._world.at(self._leaf(), self._random.randrange(self._world.num_layers)) for _ in range(3)
        ]
        return list({wording.place(name): name for name in names}.values())

    def _lens(self) -> Json:
        pick, layers = self._random, self._world.num_layers
        start, stop = sorted(pick.sample(range(layers + 1), 2))
        chosen = pick.sample(range(layers), pick.randint(1, layers))
        targets = pick.sample(self._world.vocab, pick.choice([0, 1, 3]))
        op: Json = {
            "layers": pick.choice(["all", f"{start}:{stop}", chosen]),
            "top_k": pick.randint(0 if targets else 1, 5),
        }
        return op | ({"targets": [self._clauses.spelled(token) for token in targets]} if targets else {})

    def _with_where(self, op: Json, request: Json) -> Json:
        where = self._clauses.where(request) if self._random.random() < 0.75 else {}
        return op | ({"where": where} if where else {})
