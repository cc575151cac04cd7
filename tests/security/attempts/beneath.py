"""What the C code beneath Python would take on trust: items of lists, indices, types, classes, layers, numbers.

An attempt that only asks for too much is held off too if it is told before the memory is taken.
"""

from __future__ import annotations

_EVIL = """
class Evil:
    def __len__(self):
        values.clear()
        return 1
    def __getitem__(self, at): return 1.0
    def __iter__(self):
        values.clear()
        return iter([1.0])
values = [Evil()] + [[1.0]] * 1000
"""
_THIEF = """
class Thief:
    def __add__(self, other): return other
    def __radd__(self, other): return other
    def __rmatmul__(self, other): return other
"""

ATTEMPTS = {
    # Classes that libraries make, with methods of any name.
    "enum-by-names": """
from enum import Enum
class E(Enum): pass
B = E('B', [('__array_interface__', {'shape': (64,), 'typestr': '|u1', 'data': (id(x), True), 'version': 3}), ('a', 1)])
import numpy
got = numpy.asarray(list(B)[0])
""",
    # Layers, which call what they hold.
    "layer-modules-set": "class S(torch.nn.Sequential): pass\ns = S()\ns._modules = {'0': model.layer1}\ngot = s(x)",
    "layer-hooks-set": "class L(torch.nn.Linear): pass\nl = L(1, 1)\nl._forward_hooks = {0: model.layer1}\ngot = 1",
    "layer-call-impl-set": "class L(torch.nn.Linear): pass\nL._call_impl = model.layer1\ngot = 1",
    "layer-forward-is-a-property": (
        "class S(torch.nn.Module):\n    @property\n    def forward(self): return model.layer1\ngot = S()"
    ),
    "layer-that-goes-through-modules": f"""{_THIEF}
class S(torch.nn.Sequential):
    def __iter__(self): return iter([lambda value: Thief(), model.layer1])
got = S()(x)
""",
    # Items of lists that torch and numpy hold pointers to.
    "list-emptied-by-float": """
class Evil:
    def __float__(self):
        values.clear()
        return 1.0
values = [Evil()] + [1.0] * 1000
got = torch.tensor(values, dtype=torch.float64)
""",
    "list-emptied-tensor": _EVIL + "got = torch.tensor(values)",
    "list-emptied-index": _EVIL + "got = x[values]",
    "list-emptied-stored": _EVIL + "x[0] = values\ngot = 1",
    "list-emptied-numpy": _EVIL + "import numpy\ngot = numpy.array(values)",
    "list-emptied-numpy-operator": _EVIL + "import numpy\ngot = numpy.ones(3) + values",
    "named-tuple-of-another-length": """
from typing import NamedTuple
class Pair(NamedTuple):
    left: float
    def __len__(self): return 10**6
got = len(torch.tensor(Pair(1.0)).tolist()) > 1
""",
    # What torch does not check, and what it leaves as it was.
    "sparse-gather": "w = torch.zeros(4, requires_grad=True)\ngot = torch.gather(w, 0, torch.tensor(1), sparse_grad=True)",
    "sparse-embedding": "got = torch.nn.functional.embedding(torch.tensor([1]), x, sparse=True)",
    "out-after-an-error": "o = torch.zeros(0)\ntorch.gather(x, 0, torch.full((9, 4), 10**9), out=o)\ngot = o",
    "where-of-numpy": "import numpy\ngot = numpy.add(numpy.zeros(9), 0, where=numpy.zeros(9, dtype=bool))",
    # Types of numpy that are no numbers.
    "numpy-object-zeros": "import numpy\ngot = numpy.zeros(3, dtype='O')",
    "numpy-structured": "import numpy\ngot = numpy.zeros(3, dtype='i4,O')",
    "numpy-text-long": "import numpy\ngot = numpy.full(1000, 'x' * 80_000)",
    "numpy-void": "import numpy\ngot = numpy.zeros(1, dtype='V80000')",
    # Sizes in other clothes: the budget of these tests is 128 MiB.
    "size-of-numpy-eye": "import numpy\ngot = numpy.eye(numpy.int64(6000))",
    "size-of-layer": "import numpy\ngot = torch.nn.Linear(numpy.int64(9000), numpy.int64(9000))",
    "times-of-tensor": "got = 'a' * torch.tensor(10**10)",
    "kept-small-tensors": "got = [x + 1 for x in [torch.zeros(16_000)] * 4000]",
    "kept-lists-written-out": "got = [[" + "0, " * 2000 + "] for _ in range(15_000)]",
    "format-many-widths": "got = ('{0:9999}' * 30_000).format(1)",
    # Numbers whose arithmetic takes as long as one likes.
    "int-of-hex": "got = int('f' * 10_000_000, 16)",
    "divmod": "n = int('f' * 3_000_000, 16)\ngot = divmod(n, n // 3)",
    "gcd": "import math\ngot = math.gcd(int('f' * 3_000_000, 16), 7)",
    "power-modulo": "n = int('f' * 25_000, 16)\ngot = pow(3, n, n)",
    "power-of-a-fraction": """
import statistics
class N:
    def __init__(self, value=None): kept.append(value)
    def as_integer_ratio(self): return (3, 2)
kept = []
try:
    statistics.mean([N(), N()])
except Exception:
    pass
got = kept[-1] ** 10**9
""",
    "round-far": "got = round(5, -10**9)",
    "encode-punycode": "got = ''.join(map(chr, range(1000, 9000))).encode('punycode')",
}
