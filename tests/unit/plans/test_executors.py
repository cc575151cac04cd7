"""Both executors do what a plain computation does, on random programs, and the GPU's compiles for GPUs.

Triton decides at its import whether kernels are interpreted, so its executor runs in a process of its own:
this module's ``main``, which takes the number of cases.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from typing import Any, Final

import numpy as np
import pytest
import torch

from nnsight_engine.plans.step.instructions import (
    AND,
    DTYPE_CODES,
    NOT,
    OR,
    Code,
    Executor,
    Instructions,
    Number,
    Word,
)

MODULE: Final = "tests.unit.plans.test_executors"
NUM_ROWS: Final = 5
WRITES: Final = (Code.ADD, Code.NORM_MATCH, Code.PROJECT, Code.SUBSPACE, Code.CHANGE, Code.SET)
FLOATS: Final = (torch.float32, torch.float16, torch.bfloat16)


class Case:
    """Random programs on a random value, and what they give.

    Numbers are small integers, so that sums are exact in any order.
    """

    def __init__(self, seed: int) -> None:
        self.draw = draw = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.width = draw.choice((1, 7, 33, 1100))
        self.dtype = draw.choice((*FLOATS, torch.int32, torch.int64))
        self.hidden = self._spread(self.numbers(NUM_ROWS, self.width).to(self.dtype))
        self.residual: torch.Tensor | None = None
        if self.dtype in FLOATS and draw.random() < 0.7:
            of = draw.choice((self.dtype, torch.float32))
            self.residual = self._spread(self.numbers(NUM_ROWS, self.width).to(of))
        if self.dtype is torch.float16 and draw.random() < 0.5:
            self.hidden *= 8000
        self.held: list[torch.Tensor] = []
        self.results: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.rows = np.asarray(sorted(draw.sample(range(NUM_ROWS), draw.randint(1, NUM_ROWS))), np.int64)
        self.expected = self.hidden.clone(), None if self.residual is None else self.residual.clone()
        programs = [[self._instruction(row) for _ in range(draw.randrange(6))] for row in self.rows.tolist()]
        self.bounds = np.cumsum([0, *map(len, programs)]).astype(np.int64)
        flat = [one for program in programs for one in program]
        self.words = np.concatenate([one.words for one in flat]) if flat else np.zeros((0, 8), np.int64)
        self.numbers_of = (
            np.concatenate([one.numbers for one in flat]) if flat else np.zeros((0, 4), np.float32)
        )

    def numbers(self, *shape: int) -> torch.Tensor:
        return torch.randint(-4, 5, shape, generator=self.generator).float()

    def _spread(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor, perhaps as a part of a larger one."""
        kind = self.draw.randrange(3)
        if kind == 0:
            return tensor.contiguous()
        if kind == 1:
            return torch.stack([tensor, tensor], dim=-1)[..., 0]
        return torch.cat([tensor, tensor], dim=-1)[:, : tensor.shape[1]]

    def address(self, tensor: torch.Tensor) -> int:
        self.held.append(tensor)
        return tensor.data_ptr()

    def result(self, made: torch.Tensor, expected: torch.Tensor) -> int:
        """Return where a result is to be, and note what it should be."""
        self.results.append((made, expected))
        return made.data_ptr()

    def byte(self) -> tuple[int, bool]:
        """Return a byte's address, and whether it is set."""
        is_set = self.draw.random() < 0.6
        return self.address(torch.tensor([is_set])), is_set

    def value(self, row: int) -> torch.Tensor:
        hidden, residual = self.expected
        return hidden[row].float() + (0 if residual is None else residual[row].float())

    def change(self, row: int, change: torch.Tensor, own: Instructions) -> None:
        narrow, flag = change.to(self.dtype), torch.tensor([False])
        is_beyond = bool((narrow.isinf() & change.isfinite()).any())
        has_flag = self.dtype is torch.float16
        if has_flag:
            own.words[0, Word.OVERFLOW] = self.result(flag, torch.tensor([is_beyond]))
        if not (has_flag and is_beyond):
            self.expected[0][row] += narrow

    def _instruction(self, row: int) -> Instructions:
        draw = self.draw
        on_integers = [Code.SET, Code.READ, Code.DOT, Code.TEST, Code.HISTORY]
        codes = list(Code) if self.dtype in FLOATS else on_integers
        code = draw.choice(codes)
        own = Instructions.blank(1, code)
        is_open = True
        if code in WRITES and draw.random() < 0.4:
            own.words[0, Word.GATE], is_open = self.byte()
        getattr(self, f"_{code.name.lower()}")(row, own.words[0], own.numbers[0], own, is_open)
        return own

    def _add(self, row: int, words: Any, _: Any, __: Any, is_open: bool) -> None:
        operand = self.numbers(self.width).to(draw_dtype(self.draw, self.dtype))
        words[Word.OPERAND], words[Word.DTYPE] = self.address(operand), DTYPE_CODES[operand.dtype]
        if is_open:
            self.expected[0][row] = (self.expected[0][row].float() + operand.float()).to(self.dtype)

    def _norm_match(self, row: int, words: Any, _: Any, own: Instructions, is_open: bool) -> None:
        operand = self.numbers(self.width)
        words[Word.OPERAND], words[Word.OUT] = self.address(operand), self.address(torch.empty(1))
        if is_open:
            self.change(row, self.value(row).norm() * operand, own)

    def _project(self, row: int, words: Any, numbers: Any, own: Instructions, is_open: bool) -> None:
        operand = self.numbers(self.width)
        words[Word.OPERAND], words[Word.OUT] = self.address(operand), self.address(torch.empty(1))
        a, b = self.draw.randrange(-3, 4), self.draw.choice((0, 1, -1, 2))
        low, high = self.draw.choice(((-np.inf, np.inf), (-2, 2), (0, np.inf), (-np.inf, 3)))
        numbers[:] = a, b, low, high
        if is_open:
            along = self.value(row) @ operand
            self.change(row, (a - b * along).clamp(low - along, high - along) * operand, own)

    def _subspace(self, row: int, words: Any, numbers: Any, own: Instructions, is_open: bool) -> None:
        count = self.draw.randint(1, 3)
        basis = torch.zeros(count, self.width + 3)
        for vector in range(min(count, self.width)):
            basis[vector, vector] = self.draw.choice((1, -1))
        words[Word.OPERAND], words[Word.OUT] = self.address(basis), self.address(torch.empty(count))
        words[Word.COUNT], words[Word.DTYPE] = count, basis.stride(0)
        numbers[Number.B] = 2
        if is_open:
            own_basis = basis[:, : self.width]
            self.change(row, -2 * (self.value(row) @ own_basis.T @ own_basis), own)

    def _set(self, row: int, words: Any, _: Any, __: Any, is_open: bool) -> None:
        hidden, residual = self.expected
        operand = self.numbers(self.width).to(draw_dtype(self.draw, self.dtype))
        words[Word.OPERAND], words[Word.DTYPE] = self.address(operand), DTYPE_CODES[operand.dtype]
        units = torch.arange(self.width)
        if self.draw.random() < 0.5:
            units = torch.randperm(self.width, generator=self.generator)[: self.draw.randint(1, self.width)]
            words[Word.UNITS], words[Word.COUNT] = self.address(units), len(units)
        if is_open:
            hidden[row, units] = operand.to(self.dtype)[units]
            if residual is not None:
                residual[row, units] = 0

    def _read(self, row: int, words: Any, *_: Any) -> None:
        x, out = self.value(row), draw_dtype(self.draw, torch.float16)
        words[Word.DTYPE] = DTYPE_CODES[out]
        words[Word.OUT] = self.result(torch.zeros(self.width, dtype=out), x.to(out))
        if self.draw.random() < 0.7:
            beyond = (x.to(out).isinf() & x.isfinite()).any()
            words[Word.OVERFLOW] = self.result(torch.tensor([not beyond]), beyond.view(1))

    def _dot(self, row: int, words: Any, numbers: Any, *_: Any) -> None:
        weights = self.numbers(self.width)
        words[Word.OPERAND] = self.address(weights)
        numbers[Number.A] = 0.5
        words[Word.OUT] = self.result(torch.zeros(1), (self.value(row) @ weights + 0.5).view(1))

    def _parts(self, words: Any, numbers: Any) -> torch.Tensor:
        parts, bias = self.numbers(self.draw.randint(1, 4)), self.draw.choice((0.5, -1.5))
        words[Word.OPERAND], words[Word.COUNT] = self.address(parts), len(parts)
        words[Word.DTYPE], numbers[Number.A] = self.draw.randrange(2), bias
        total = parts.sum() + bias
        return total.sigmoid() if words[Word.DTYPE] else total

    def _score(self, _: int, words: Any, numbers: Any, *__: Any) -> None:
        words[Word.OUT] = self.result(torch.zeros(1), self._parts(words, numbers).view(1))

    def _test(self, _: int, words: Any, numbers: Any, *__: Any) -> None:
        score, sign, threshold = (
            self._parts(words, numbers),
            self.draw.choice((1, -1)),
            self.draw.choice((0, 0.3, -2)),
        )
        numbers[Number.B], numbers[Number.LOW] = sign, threshold
        words[Word.OUT] = self.result(torch.tensor([False]), (sign * score > threshold).view(1))

    def _change(self, row: int, words: Any, _: Any, own: Instructions, is_open: bool) -> None:
        operand = self.numbers(self.width) * self.draw.choice((1, 1, 20_000))
        words[Word.OPERAND] = self.address(operand)
        if is_open:
            self.change(row, operand, own)

    def _mean(self, row: int, words: Any, *_: Any) -> None:
        rows = [other for other in range(NUM_ROWS) if other != row and self.draw.random() < 0.6] or [
            1 - row % 2
        ]
        words[Word.UNITS], words[Word.COUNT] = self.address(torch.tensor(rows)), len(rows)
        mean = torch.stack([self.value(other) for other in rows]).mean(dim=0)
        words[Word.OUT] = self.result(torch.zeros(self.width), mean)

    def _distance(self, row: int, words: Any, *_: Any) -> None:
        mean, scale = self.numbers(self.width), self.numbers(self.width)
        words[Word.OPERAND], words[Word.UNITS] = self.address(mean), self.address(scale)
        words[Word.OUT] = self.result(torch.zeros(1), -((self.value(row) - mean) * scale).norm().view(1))

    def _mlp(self, row: int, words: Any, *_: Any) -> None:
        count = self.draw.randint(1, 20)
        hidden, output = self.numbers(count, self.width), self.numbers(2, count)
        words[Word.OPERAND], words[Word.UNITS], words[Word.COUNT] = (
            self.address(hidden),
            self.address(output),
            count,
        )
        found = (hidden @ self.value(row) + output[0]).relu() @ output[1]
        words[Word.OUT] = self.result(torch.zeros(1), found.view(1))

    def _history(self, _: int, words: Any, numbers: Any, *__: Any) -> None:
        draw, num_rows, start, size = self.draw, self.draw.randint(1, 6), self.draw.randrange(6), 14
        count, over = draw.randint(1, 3), draw.randrange(3)
        length, takes_mean, latches = draw.randint(1, 5), draw.randrange(2), draw.random() < 0.2
        prompt, sign, threshold = draw.randint(1, 10), draw.choice((1, -1)), draw.choice((0, 0.7, -2.3, 3.1))
        keeps = threshold - draw.choice((0, 2))
        parts, scores, reduced = self.numbers(num_rows, count), self.numbers(size), self.numbers(size)
        if draw.random() < 0.1:
            parts[0, 0] = torch.nan
        held = torch.randint(0, 2, (size,), generator=self.generator, dtype=torch.bool)
        own = [*parts.sum(dim=1).mul(sign).tolist()]
        expected = scores.clone(), reduced.clone(), held.clone(), torch.zeros(num_rows, dtype=torch.bool)
        running = float(reduced[start - 1]) if start else (0.0 if takes_mean else -np.inf)
        is_held = bool(start and held[start - 1])
        for index, score in enumerate(own):
            at, value = start + index, score
            if over == 1:
                expected[0][at] = score
                some = expected[0][max(0, at - length + 1) : at + 1]
                value = float(some.mean() if takes_mean else some.amax())
            elif over == 2:
                if at < prompt:
                    running = running + score if takes_mean else float(np.maximum(running, score))
                expected[1][at] = running
                value = running / min(at + 1, prompt) if takes_mean else running
            is_held = value > threshold or (is_held and (latches or value > keeps))
            expected[2][at] = expected[3][index] = is_held
        made = scores.clone(), reduced.clone(), held.clone(), torch.zeros(num_rows, dtype=torch.bool)
        addresses = [self.result(one, right) for one, right in zip(made, expected, strict=True)]
        record = [num_rows, start, prompt, over, length, takes_mean, latches, *addresses[:3]]
        words[Word.UNITS] = self.address(torch.tensor(record, dtype=torch.int64))
        words[Word.OPERAND], words[Word.COUNT], words[Word.OUT] = self.address(parts), count, addresses[3]
        numbers[:] = 0, sign, threshold, keeps

    def _join(self, _: int, words: Any, *__: Any) -> None:
        program, stack = [], []
        for _step in range(self.draw.randint(1, 6)):
            address, is_set = self.byte()
            program.append(address)
            stack.append(is_set)
            if self.draw.random() < 0.4:
                program.append(NOT)
                stack.append(not stack.pop())
        while len(stack) > 1:
            operator, right, left = self.draw.choice((AND, OR)), stack.pop(), stack.pop()
            program.append(operator)
            stack.append(left and right if operator == AND else left or right)
        words[Word.OPERAND] = self.address(torch.tensor(program))
        words[Word.COUNT] = len(program)
        is_named = True
        if self.draw.random() < 0.3:
            words[Word.UNITS], is_named = self.byte()
        words[Word.OUT] = self.result(torch.tensor([False]), torch.tensor([stack[0] and is_named]))

    def check(self, executor: Executor, *, truncates: bool = False) -> None:
        """Run the programs in two parts, and compare; ``truncates`` if bfloat16 is not rounded to nearest."""
        table = (self.rows, self.bounds, self.words, self.numbers_of)
        execute = executor(*map(torch.from_numpy, table))
        half = self.draw.randint(0, len(self.rows))
        for first, stop in ((0, half), (half, len(self.rows))):
            if first < stop:
                execute(first, stop, self.hidden, self.residual)
        for made, expected in [*self.results, *zip((self.hidden, self.residual), self.expected, strict=True)]:
            if made is not None:
                # Norms are not exact, and rounding may show that.
                rtol = max(1e-4, torch.finfo(made.dtype).eps) if made.dtype in FLOATS else 0.0
                if truncates and torch.bfloat16 in {made.dtype, self.dtype}:
                    rtol = 4 * torch.finfo(torch.bfloat16).eps
                torch.testing.assert_close(made, expected, rtol=rtol, atol=rtol, equal_nan=True)


def draw_dtype(draw: random.Random, own: torch.dtype) -> torch.dtype:
    return draw.choice((own, torch.float32)) if own not in FLOATS else draw.choice((own, *FLOATS))


@pytest.mark.parametrize("seed", range(300))
def test_programs_on_a_cpu(seed: int) -> None:
    from nnsight_engine.plans.step.cpu_executor import executor  # noqa: PLC0415 - numba is slow to import

    Case(seed).check(executor)


def test_programs_in_tritons_interpreter() -> None:
    done = subprocess.run(
        [sys.executable, "-m", MODULE, "150"],
        env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_numbers_are_rounded_as_torch_does(dtype: torch.dtype) -> None:
    from nnsight_engine.plans.step.cpu_executor import executor  # noqa: PLC0415

    generator = torch.Generator().manual_seed(0)
    patterns = torch.randint(-(2**31), 2**31, (300_000,), generator=generator, dtype=torch.int64)
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    exact = torch.cat([every.view(narrow).float() for narrow in (torch.float16, torch.bfloat16)])
    finite = exact[exact.isfinite()].sort().values.double()
    halfway = ((finite[1:] + finite[:-1]) / 2).float()
    numbers = torch.cat([patterns.to(torch.int32).view(torch.float32), exact, halfway]).unsqueeze(0)
    for value in (numbers, exact.to(dtype).unsqueeze(0)):
        out = torch.empty(value.shape, dtype=dtype)
        own = Instructions.blank(1, Code.READ)
        own.words[0, Word.OUT], own.words[0, Word.DTYPE] = out.data_ptr(), DTYPE_CODES[dtype]
        row, bounds = torch.zeros(1, dtype=torch.int64), torch.arange(2)
        execute = executor(row, bounds, torch.from_numpy(own.words), torch.from_numpy(own.numbers))
        execute(0, 1, value, None)
        torch.testing.assert_close(out, value.to(dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("capability", [80, 90])
def test_the_kernel_compiles_for_gpus(capability: int, has_residual: bool) -> None:
    import triton  # noqa: PLC0415 - slow to import
    from triton.backends.compiler import GPUTarget  # noqa: PLC0415
    from triton.compiler import ASTSource  # noqa: PLC0415

    from nnsight_engine.plans.step.gpu_executor import _run  # noqa: PLC0415

    addresses = dict.fromkeys(("rows", "bounds", "words"), "*i64") | {"numbers": "*fp32"}
    types = dict.fromkeys(_run.arg_names, "i32") | addresses | dict.fromkeys(("hidden", "residual"), "i64")
    constants = {"HAS_RESIDUAL": has_residual, "BLOCK": 1024, "h_stride": 1, "r_stride": 1}
    types |= dict.fromkeys(constants, "constexpr")
    of_places = {(_run.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=_run, signature=types, constexprs=of_places)
    assert triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"]


def main() -> None:
    """Compare the GPU's executor."""
    from nnsight_engine.plans.step.gpu_executor import executor, prepare  # noqa: PLC0415

    prepare(torch.device("cpu"), torch.bfloat16)
    for seed in range(int(sys.argv[1])):
        try:
            Case(seed).check(executor, truncates=True)
        except BaseException:
            print("case", seed)  # noqa: T201 - shown if the test fails
            raise


if __name__ == "__main__":
    main()
