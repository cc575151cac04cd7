"""What travels between a block in the engine's own process and the one that traces, in both directions.

A case returns values, which must be the same on an engine in a process of its own and on one in this process;
what else it promises, it asserts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch

from nnsight_engine import save
from nnsight_engine.interleaving.threads import TimeBudgetError
from nnsight_engine.serialization import DecodeError
from nnsight_engine.vllm_backend.compat import EngineLimits
from nnsight_engine.vllm_backend.vllm import VLLM
from tests.e2e import traced_scenarios as scenarios
from tests.e2e.point_blocks import PROMPT
from tests.e2e.traced_scenarios import GREEDY
from tests.e2e.traces import HeldTracer
from tests.families.checkpoints import HIDDEN_SIZE, write_checkpoint

OTHER: Final = [91, 120, 33, 44, 260, 18]
_TOLERANCE: Final = 1e-4


class OwnError(ValueError):
    def __init__(self, number: int) -> None:
        super().__init__(f"my number is {number}")
        self.number = number


class Pair:
    def __init__(self, first: Any, second: Any) -> None:
        self.first, self.second = first, second


class Doubler:
    def __init__(self, times: int) -> None:
        self.times = times

    def __call__(self, value: torch.Tensor) -> Any:
        return value * 2**self.times


class Spinning:
    """What never comes to an end of being written."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        spin()


class Leaving:
    """A value that ends the process that encodes it."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        sys.exit(5)


class Unreadable:
    """A value that ends the worker that decodes it."""

    if threading.current_thread().name.startswith("nnsight-engine-block"):
        raise SystemExit


@contextlib.contextmanager
def raises(kind: type[BaseException] | str, text: str = "") -> Iterator[list[BaseException]]:
    """Expect an error of a type, or of a type of this name."""
    caught: list[BaseException] = []
    try:
        yield caught
    except Exception as error:  # noqa: BLE001 - looked at below
        caught.append(error)
    assert caught, f"expected {kind}, got no error"
    named = kind if isinstance(kind, str) else kind.__name__
    assert named in {one.__name__ for one in type(caught[0]).__mro__}, f"expected {kind}, got {caught[0]!r}"
    assert text in str(caught[0]), caught[0]


def throw(error: BaseException) -> None:
    raise error


def leave(code: int = 0) -> None:
    sys.exit(code)


def spin() -> None:
    while True:
        pass


def sleep_through_everything() -> None:
    while True:
        with contextlib.suppress(TimeBudgetError):
            time.sleep(0.01)


def traced(model: VLLM, *prompt: list[int], **options: Any) -> Any:
    return model.trace(*prompt, **{**GREEDY, **options})


# Values.


def lists_shared_by_invokes(model: VLLM) -> Any:
    with traced(model) as tracer:
        order, rows = save([]), save({})
        barrier = tracer.barrier(2)
        with tracer.invoke(PROMPT, max_tokens=2):
            order.append("first")
            rows["first"] = model.layers[1].output[-1].clone()
            barrier()
        with tracer.invoke(OTHER, max_tokens=3):
            barrier()
            order.append("second")
            model.layers[2].output[-1] = rows["first"]
            rows["second"] = model.layers[2].output[-1].clone()
            rows["order"] = order
    assert order == ["first", "second"]
    assert rows["order"] is order
    return [rows["first"], rows["second"]]


def own_code(model: VLLM) -> Any:
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(HIDDEN_SIZE, 8), torch.nn.GELU())
    offset = 3

    def shifted(value: torch.Tensor) -> torch.Tensor:
        return value + offset

    doubler = Doubler(3)
    with traced(model, PROMPT):
        hidden = save(model.layers[1].output)
        found = save(doubler(shifted(network(hidden))))
    assert torch.allclose(found, (network(hidden) + 3) * 8, rtol=1e-4, atol=1e-4)
    return found


def objects_of_ones_own_are_refused(model: VLLM) -> Any:
    with raises(DecodeError, "Pair"), traced(model, PROMPT):
        pair = save(Pair(1, model.layers[1].output))  # noqa: F841 - comes back, or would
    return still_works(model)


# Errors.


def an_error_of_ones_own(model: VLLM) -> Any:
    with raises("OwnError", "my number is 7") as caught, traced(model, PROMPT):
        _ = model.layers[1].output
        try:
            throw(KeyError("the cause"))
        except KeyError as cause:
            raise OwnError(7) from cause  # the line
    (error,) = caught
    assert isinstance(error, ValueError)
    assert getattr(error, "number", None) == 7
    assert isinstance(error.__cause__, KeyError)
    shown = "".join(traceback.format_exception(error))
    assert "# the line" in shown
    assert "the cause" in shown
    return still_works(model)


def what_cannot_travel_back(model: VLLM) -> Any:
    with raises("EncodeError", "handle"), traced(model, PROMPT):
        handle = save(open("/dev/null"))  # noqa: F841, SIM115 - as said
    with raises("EncodeError", "lock"), traced(model, PROMPT):
        held: dict[str, Any] = save({})
        held["lock"] = threading.Lock()
    with raises("EncodeError"), traced(model, PROMPT):
        drawn = save(number for number in range(3))  # noqa: F841 - as said
    return still_works(model)


def what_does_harm_as_it_travels(model: VLLM) -> Any:
    with raises(TimeBudgetError), traced(model, PROMPT):
        found = save([model.layers[1].output, Spinning()])
    with raises("Exception"), traced(model, PROMPT):
        found = save([model.layers[1].output, Leaving()])  # noqa: F841 - never comes back
    with raises("Exception"), traced(model, PROMPT):
        unread = save(Unreadable())  # noqa: F841 - the same
    return still_works(model)


def what_ends_a_thread(model: VLLM) -> Any:
    with raises("SystemExit", "3"), traced(model, PROMPT):
        leave(3)
    with raises("SystemExit"), traced(model, PROMPT, max_tokens=3) as tracer:
        for _ in tracer.iter[1:]:
            _ = model.layers[1].output
            throw(SystemExit())
    with raises("KeyboardInterrupt"), traced(model, PROMPT):
        _ = model.samples.output
        throw(KeyboardInterrupt())
    with raises("GeneratorExit"), traced(model, PROMPT):
        _ = model.logits.output
        throw(GeneratorExit())
    return still_works(model)


def failing_beside_others(model: VLLM) -> Any:
    with traced(model, PROMPT, max_tokens=8, tracer_cls=HeldTracer) as leaving:
        _ = model.layers[1].output
        leave()
    with traced(model, PROMPT, max_tokens=8, tracer_cls=HeldTracer) as spoiling:
        for step in spoiling.iter[:]:
            model.layers[1].output[:] = float("nan")
            if step == 3:
                raise OwnError(3)
    failing = {"SystemExit": leaving.sent, "OwnError": spoiling.sent}
    scenarios.assert_each_fails_alone(model, failing | scenarios.failing_at(model, 1))
    return still_works(model)


def still_works(model: VLLM) -> Any:
    with traced(model, PROMPT):
        logits = model.logits.output.save()
    assert not any(model.engine.collective_rpc("count_interventions")[0].values())
    return logits


CASES: Final[dict[str, Callable[[VLLM], Any]]] = {
    case.__name__: case
    for case in (
        lists_shared_by_invokes,
        own_code,
        objects_of_ones_own_are_refused,
        an_error_of_ones_own,
        what_cannot_travel_back,
        what_does_harm_as_it_travels,
        what_ends_a_thread,
        failing_beside_others,
        *scenarios.SCENARIOS,
    )
}


@dataclasses.dataclass
class Failed:
    text: str


def run_all(checkpoint: Path) -> dict[str, Any]:
    model = VLLM(
        str(checkpoint),
        dispatch=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=16,
        num_gpu_blocks_override=32,
        limits=EngineLimits(trace_step_s=5.0),
    )
    results = {name: _tried(case, model) for name, case in CASES.items()}
    model.shutdown()
    return results


def _tried(case: Callable[[VLLM], Any], model: VLLM) -> Any:
    try:
        return case(model)
    except Exception:  # noqa: BLE001 - whatever it is, the report says it and the next case runs
        return Failed(traceback.format_exc())


def _difference(here: Any, apart: Any) -> str | None:
    try:
        torch.testing.assert_close(apart, here, rtol=_TOLERANCE, atol=_TOLERANCE)
    except AssertionError as error:
        return str(error)
    return None


def check(family: str, folder: Path) -> dict[str, str | None]:
    """Run every case on both engines; return by case what went wrong."""
    checkpoint = write_checkpoint(family, folder / family)
    apart = run_all(checkpoint)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    here = run_all(checkpoint)
    report: dict[str, str | None] = {}
    for name in CASES:
        failed = [
            f"{where}: {one.text}"
            for where, one in (("apart", apart[name]), ("here", here[name]))
            if isinstance(one, Failed)
        ]
        report[name] = "\n".join(failed) or _difference(here[name], apart[name])
    return report
