from __future__ import annotations

import asyncio
import functools
import inspect
import pathlib
import traceback
from collections.abc import Callable, Generator
from types import MethodType
from typing import Any

import pytest
import torch
import transformers

from nnsight_engine.envoys.source.definition import Rewritten
from nnsight_engine.envoys.source.rewrite import rewrite
from tests.small_models import tiny_gpt2, tiny_llama

SCALE = 3


def just_call(name: str, callee: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return callee(*args, **kwargs)


class Recorder:
    """Calls, and remembers what was called; values in ``replaced`` take a result's place."""

    def __init__(self, **replaced: object) -> None:
        self.called: list[str] = []
        self.replaced = replaced

    def __call__(
        self, name: str, callee: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        result = callee(*args, **kwargs)
        self.called.append(name)
        return self.replaced.get(name, result)


def names_of(rewritten: Rewritten) -> list[str]:
    return [operation.name for operation in rewritten.operations]


def double(x: Any) -> Any:
    return x * 2


def add(*terms: Any, **named: Any) -> Any:
    return sum(terms) + sum(named.values())


# --- Real models ---


def tiny_bert() -> torch.nn.Module:
    config = transformers.BertConfig(
        vocab_size=16, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
    )
    bert: torch.nn.Module = transformers.BertForMaskedLM(config).eval()
    return bert


@pytest.mark.parametrize("make", [tiny_gpt2, tiny_llama, tiny_bert])
def test_a_rewritten_model_gives_the_same_logits_and_calls_operations_in_the_order_listed(
    make: Callable[[], torch.nn.Module],
) -> None:
    model = make()
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    with torch.no_grad():
        expected = model(tokens).logits
        recorders: list[tuple[Recorder, list[str]]] = []
        for path, module in model.named_modules():
            rewritten = rewrite(module.forward, recorder := Recorder(), path)
            recorders.append((recorder, names_of(rewritten)))
            module.forward = MethodType(rewritten.function, module)
        try:
            assert torch.equal(model(tokens).logits, expected)
        finally:
            for module in model.modules():
                del module.forward
    assert sum(len(recorder.called) for recorder, _ in recorders) > 100
    for recorder, listed in recorders:
        assert len(set(listed)) == len(listed)
        first_calls = list(dict.fromkeys(recorder.called))
        assert first_calls == [name for name in listed if name in first_calls]


# --- The language ---


def test_names_count_per_callee_and_nested_calls_come_first() -> None:
    def function(x: torch.Tensor, fs: list[Any]) -> Any:
        y = torch.nn.functional.relu(double(double(x)))
        z = x.view(1, -1).transpose(0, 1)
        return fs[0](y), fs[0](z), functools.partial(double)(y), (fs or fs)[0](x), "".join([])

    names = names_of(rewrite(function, just_call, "f"))
    assert names[:3] == ["double_0", "double_1", "torch_nn_functional_relu_0"]
    assert names[3:5] == ["x_view_0", "transpose_0"]
    assert names[5:] == [
        "fs_0",
        "fs_1",
        "functools_partial_0",
        "functools_partial_call_0",
        "call_0",
        "join_0",
    ]


def test_evaluation_order_is_kept_and_listed() -> None:
    log: list[str] = []

    def e(key: str, value: Any = 0) -> Any:
        log.append(key)
        return value

    def function() -> Any:
        box = {0: 1}
        e("target", box)[e("index")] = e("value")
        e("a", box)[e("b")] += e("c")
        found = {e("k", 1): e("v"), e("k2", 2): e("v2")}
        e("callee", add)(e("1"), *e("2", [3]), n=e("3"), **e("4", {"m": 1}))
        total = [e("elt", x) for x in e("iter", [1]) if e("if", value=True)]
        pairs = {e("dk", x): e("dv", x) for x in e("di", [1])}
        for e("for target", box)[0] in e("for iter", [1]):  # noqa: B020 - a call in the target
            e("for body")
        return found, total, pairs, e("then") if e("test", value=True) else 0, e("lt", 1) < e("gt", 2)

    expected = function()
    plain_log = log.copy()
    log.clear()
    recorder = Recorder()
    rewritten = rewrite(function, recorder, "f")
    assert rewritten.function() == expected
    assert log == plain_log
    assert recorder.called == names_of(rewritten)
    assert len(log) == len(recorder.called) - 1 == 28  # one for ``add``


def test_closure_cells_are_shared() -> None:
    count = 0

    def function() -> Any:
        nonlocal count
        count += 1
        return double(count)

    rewritten = rewrite(function, just_call, "f")
    assert rewritten.function() == 2
    assert count == 1
    count = 10
    assert rewritten.function() == 22


def test_signature_defaults_and_names_are_kept_and_globals_not_polluted() -> None:
    def function(a: int, /, b: int = 2, *rest: int, c: int = 3, **named: int) -> Any:
        """Sum up."""
        return add(a, b, *rest, c=c, **named) * SCALE

    function.note = "kept"  # type: ignore[attr-defined] # any attribute
    before = set(globals())
    made = rewrite(function, just_call, "f").function
    assert made(1) == 18
    assert made(1, 2, 3, 4, c=5, d=6) == function(1, 2, 3, 4, c=5, d=6) == 63
    assert inspect.signature(made) == inspect.signature(function)
    assert (made.__name__, made.__qualname__, made.__doc__) == (
        function.__name__,
        function.__qualname__,
        "Sum up.",
    )
    assert made.__module__ == function.__module__
    assert made.__code__.co_qualname == function.__code__.co_qualname
    assert made.__globals__ is function.__globals__
    assert made.__dict__ == {"note": "kept"}
    assert set(globals()) == before


def test_arguments_may_have_any_name_and_are_checked_as_always() -> None:
    def function(options: dict[str, int]) -> Any:
        return add(name=1, callee=2, call=3, self=4, **options)

    made = rewrite(function, just_call, "f").function
    assert made({}) == 10
    with pytest.raises(TypeError, match="multiple values for keyword argument 'name'"):
        made({"name": 1})


class Base(torch.nn.Module):
    def forward(self, x: int) -> int:
        return x + 1


class Derived(Base):
    def __hidden(self, x: int) -> int:
        return x * 10

    def forward(self, x: int) -> int:
        return self.__hidden(super().forward(x)) + super(Derived, self).forward(x)  # noqa: UP008 - both forms

    def with_nested(self, x: int) -> int:
        def nested(y: int) -> int:
            return super(__class__, self).forward(self.__hidden(y))  # type: ignore[name-defined] # a cell

        return rewrite(nested, just_call, "nested").function(x)  # type: ignore[no-any-return]


def test_super_and_private_names_work() -> None:
    module = Derived()
    rewritten = rewrite(module.forward, just_call, "forward")
    assert names_of(rewritten) == ["super_forward_0", "self___hidden_0", "super_forward_1"]
    assert rewritten.function(module, 1) == module.forward(1) == 22
    assert module.with_nested(1) == 11


def test_nested_functions_and_lambdas_are_left_alone_and_comprehensions_are_not() -> None:
    def function(xs: list[int]) -> list[int]:
        def nested(x: int) -> Any:
            return double(x)

        def key(x: int) -> int:
            return -x

        ordered = sorted(xs, key=lambda x: key(x) + 1)
        total = sum(abs(x) for x in ordered)
        return [double(nested(x)) for x in ordered if bool(x)] + [total]

    recorder = Recorder()
    rewritten = rewrite(function, recorder, "f")
    assert rewritten.function([1, 2]) == function([1, 2]) == [8, 4, 3]
    assert names_of(rewritten) == ["sorted_0", "abs_0", "sum_0", "bool_0", "nested_0", "double_0"]
    assert recorder.called.count("double_0") == 2


def test_a_module_level_function_may_call_itself() -> None:
    recorder = Recorder()
    assert rewrite(countdown, recorder, "countdown").function(2) == 0
    assert recorder.called == ["countdown_0"]  # the inner calls are the original's


def countdown(n: int) -> int:
    return countdown(n - 1) if n else n


def test_walrus_f_strings_annotations_and_assignments_of_every_kind() -> None:
    def function(x: int) -> str:
        box: dict[str, dict[int, Any]] = {str(x): {}}
        box[str(x)][0]: list[int] = [double(x)]  # type: ignore[misc] # unusual and legal
        if (y := double(x)) > 1:
            y += abs(-y)
        with pytest.raises(ValueError, match=r"no"):
            raise ValueError("no")
        match y:
            case int() if bool(y):
                return f"{y} {abs(x):>{len('ab')}} {box}"
        return ""

    recorder = Recorder()
    assert rewrite(function, recorder, "f").function(1) == function(1) == "4  1 {'1': {0: [2]}}"
    assert recorder.called[:4] == ["str_0", "double_0", "str_1", "double_1"]


def test_generators_and_coroutines_stay_what_they_are() -> None:
    def generate(n: int) -> Generator[int, int | None, None]:
        for index in range(n):
            yield double((yield index) or index)

    async def wait(x: int) -> Any:
        await asyncio.sleep(0)
        return double(await wait_more(x))

    async def wait_more(x: int) -> int:
        return x + 1

    made = rewrite(generate, just_call, "g").function
    assert list(made(2)) == list(generate(2)) == [0, 0, 1, 2]
    recorder = Recorder()
    assert asyncio.run(rewrite(wait, recorder, "w").function(1)) == 4
    assert recorder.called == ["asyncio_sleep_0", "wait_more_0", "double_0"]


def test_calls_that_look_at_their_frame_stay_in_it() -> None:
    def function(x: int) -> Any:
        return eval("x + 1"), globals() is inspect.currentframe().f_globals, vars(torch.Size).get("none")  # type: ignore[union-attr]

    rewritten = rewrite(function, just_call, "f")
    assert rewritten.function(1) == (2, True, None)
    assert names_of(rewritten) == ["vars_0", "get_0"]


def test_text_and_lines_of_an_operation() -> None:
    def function(x: Any) -> Any:
        """Ünïcödé.

  less indented than the code
        """  # fmt: skip
        return (
            x.to("ü", x)
            .view(
                1,
            )
        )  # fmt: skip

    rewritten = rewrite(function, just_call, "f")
    to, view = rewritten.operations
    assert (to.text, to.line, to.end_line) == ('x.to("ü", x)', 6, 6)
    assert (view.line, view.end_line) == (7, 9)
    assert view.text.endswith(".view(\n                1,\n            )")
    lines = rewritten.source.split("\n")
    assert lines[0] == "def function(x: Any) -> Any:"
    assert lines[3] == "  less indented than the code"
    assert lines[-1] == "    )  # fmt: skip"
    file_lines = pathlib.Path(rewritten.filename).read_text(encoding="utf-8").splitlines()
    assert file_lines[rewritten.first_line + to.line - 1].strip() == 'x.to("ü", x)'
    assert rewritten.function.__doc__ == function.__doc__


# --- Decorators ---


def test_decorated_forward_is_rewritten_inside_its_decorators() -> None:
    def returning(kind: type) -> Callable[..., Any]:
        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(function)
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                return kind([function(*args, **kwargs)])

            return wrapper

        return decorate

    @returning(tuple)
    @torch.no_grad()
    @returning(list)
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.add(x, 1)

    recorder = Recorder()
    rewritten = rewrite(function, recorder, "f")
    x = torch.zeros(2, requires_grad=True)
    ((result,),) = rewritten.function(x)
    assert torch.equal(result, torch.ones(2))
    assert not result.requires_grad
    assert recorder.called == ["torch_add_0"]
    assert rewritten.function.__wrapped__.__wrapped__.__wrapped__ is not function.__wrapped__  # type: ignore[attr-defined]
    assert rewritten.source.startswith("@returning(tuple)\n@torch.no_grad()\n@returning(list)\ndef function(")
    function(x)
    assert recorder.called == ["torch_add_0"]  # the original and its wrappers are as they were


def test_wrapped_bound_method_stays_bound() -> None:
    module = Derived()
    inner = module.forward

    @functools.wraps(inner)
    def forward(x: int) -> int:
        return inner(x) + 100

    recorder = Recorder()
    assert rewrite(forward, recorder, "forward").function(1) == 122
    assert recorder.called == ["super_forward_0", "self___hidden_0", "super_forward_1"]


# --- Errors ---


def test_errors_show_the_original_file_and_line() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.view(4)
        return (
            torch.relu(y)
            .reshape(7)
        )  # fmt: skip

    def frame_of(called: Callable[..., Any]) -> traceback.FrameSummary:
        with pytest.raises(RuntimeError) as caught:
            called(torch.zeros(4))
        frames = traceback.extract_tb(caught.tb)
        return next(frame for frame in frames if frame.name == "function")

    plain = frame_of(function)
    shown = frame_of(rewrite(function, just_call, "f").function)
    assert (shown.filename, shown.lineno, shown.line) == (plain.filename, plain.lineno, plain.line)
    assert shown.line == ".reshape(7)"
    assert (shown.colno, shown.end_colno) == (plain.colno, plain.end_colno)
