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
    "enum-by-names-keyword": "from enum import Enum\nclass E(Enum): pass\ngot = E('B', names='a b')",
    "enum-by-names-module": "from enum import Enum\nclass E(Enum): pass\ngot = E('B', names='a', module='transformers.a', type=dict)",
    "enum-by-names-map": "from enum import Enum\nclass E(Enum): pass\ngot = list(map(E, ['B'], ['a b']))",
    "enum-by-names-partial": "import functools\nfrom enum import Enum\nclass E(Enum): pass\ngot = functools.partial(E, 'B')('a b')",
    "enum-by-names-default": "import collections\nfrom enum import IntEnum\nclass E(IntEnum): pass\ngot = collections.defaultdict(E)['a']",
    "enum-new-member": "from enum import Enum\nclass E(Enum): pass\ngot = E._new_member_",
    "enum-member-type": "from enum import Enum\nclass E(Enum): pass\ngot = E._member_type_",
    "enum-value-repr": "from enum import IntEnum\nclass E(IntEnum): a = 1\ngot = E._value_repr_",
    "enum-use-args": "from enum import Enum\nclass E(Enum): a = 1\ngot = getattr(E, '_use_args_', None) is not None",
    "enum-of-member": "from enum import Enum\nclass E(Enum): a = 1\ngot = E.a._member_map_",
    "enum-map-set": "from enum import Enum\nclass E(Enum): a = 1\nE._value2member_map_ = {}\ngot = 1",
    # Layers, which call what they hold.
    "layer-modules-set": "class S(torch.nn.Sequential): pass\ns = S()\ns._modules = {'0': model.layer1}\ngot = s(x)",
    "layer-modules-read": "class S(torch.nn.Sequential): pass\ns = S()\ns._modules['0'] = model.layer1\ngot = 1",
    "layer-modules-by-getattr": "class S(torch.nn.Sequential): pass\ngot = getattr(S(), '_modules')",
    "layer-modules-by-vars": "class S(torch.nn.Sequential): pass\ngot = vars(S())['_modules']",
    "layer-modules-in-the-class": "class S(torch.nn.Sequential):\n    _modules = {}\ngot = 1",
    "layer-modules-of-a-dataclass": "import dataclasses\n@dataclasses.dataclass\nclass S(torch.nn.Sequential):\n    a: int = 1\ngot = 1",
    "layer-hooks-set": "class L(torch.nn.Linear): pass\nl = L(1, 1)\nl._forward_hooks = {0: model.layer1}\ngot = 1",
    "layer-hooks-read": "class L(torch.nn.Linear): pass\ngot = L(1, 1)._forward_pre_hooks",
    "layer-hooks-deleted": "class L(torch.nn.Linear): pass\nl = L(1, 1)\ndel l._backward_hooks\ngot = 1",
    "layer-hooks-of-the-class": "class L(torch.nn.Linear): pass\nL._forward_hooks = {}\ngot = 1",
    "layer-call-impl-set": "class L(torch.nn.Linear): pass\nL._call_impl = model.layer1\ngot = 1",
    "layer-call-impl-super": "class L(torch.nn.Linear):\n    def go(self): return super()._call_impl\ngot = L(1, 1).go()",
    "layer-forward-set": "class S(torch.nn.Module): pass\ns = S()\ns.forward = model.layer1\ngot = s",
    "layer-forward-in-the-class": "class S(torch.nn.Module):\n    forward = model.layer1\ngot = S()",
    "layer-forward-is-a-property": (
        "class S(torch.nn.Module):\n    @property\n    def forward(self): return model.layer1\ngot = S()"
    ),
    "layer-that-goes-through-modules": f"""{_THIEF}
class S(torch.nn.Sequential):
    def __iter__(self): return iter([lambda value: Thief(), model.layer1])
got = S()(x)
""",
    "layer-that-goes-through-modules-of-another": f"""{_THIEF}
class S(torch.nn.Sequential):
    def __iter__(self): return iter([lambda value: Thief(), model.layer1])
got = torch.nn.Sequential(S())(x)
""",
    "layer-sparse-set": "class E(torch.nn.Embedding): pass\ne = E(3, 3)\ne.sparse = True\ngot = e",
    "point-among-several": f"{_THIEF}\npoints = model.points\npoints['embed.output'], a = Thief(), 1\ngot = 1",
    # Items of lists that torch and numpy hold pointers to.
    "list-emptied-by-float": """
class Evil:
    def __float__(self):
        values.clear()
        return 1.0
values = [Evil()] + [1.0] * 1000
got = torch.tensor(values, dtype=torch.float64)
""",
    "list-emptied-by-int": "class Evil:\n    def __int__(self): return 1\ngot = Evil()",
    "list-emptied-tensor": _EVIL + "got = torch.tensor(values)",
    "list-emptied-as-tensor": _EVIL + "got = torch.as_tensor(values, dtype=torch.float64)",
    "list-emptied-new-tensor": _EVIL + "got = x.new_tensor(values)",
    "list-emptied-deep": _EVIL + "got = torch.tensor([[values]])",
    "list-emptied-tuple": _EVIL + "got = torch.tensor((values, values))",
    "list-emptied-tensor-class": _EVIL + "got = torch.Tensor(values)",
    "list-emptied-index": _EVIL + "got = x[values]",
    "list-emptied-index-in-tuple": _EVIL + "got = x[0, values]",
    "list-emptied-stored": _EVIL + "x[0] = values\ngot = 1",
    "list-emptied-stored-among-several": _EVIL + "x[0], a = values, 1\ngot = 1",
    "list-emptied-stored-by-for": _EVIL + "for x[0] in [values]: pass\ngot = 1",
    "list-emptied-numpy": _EVIL + "import numpy\ngot = numpy.array(values)",
    "list-emptied-numpy-mean": _EVIL + "import numpy\ngot = numpy.mean(values)",
    "list-emptied-numpy-operator": _EVIL + "import numpy\ngot = numpy.ones(3) + values",
    "list-emptied-numpy-compare": _EVIL + "import numpy\ngot = numpy.ones(3) < values",
    "list-emptied-numpy-index": _EVIL + "import numpy\ngot = numpy.ones(3)[values]",
    "list-emptied-numpy-stored": _EVIL + "import numpy\na = numpy.ones(3)\na[:] = values\ngot = 1",
    "named-tuple-of-another-length": """
from typing import NamedTuple
class Pair(NamedTuple):
    left: float
    def __len__(self): return 10**6
got = len(torch.tensor(Pair(1.0)).tolist()) > 1
""",
    # What torch does not check, and what it leaves as it was.
    "sparse-gather": "w = torch.zeros(4, requires_grad=True)\ngot = torch.gather(w, 0, torch.tensor(1), sparse_grad=True)",
    "sparse-gather-method": "w = torch.zeros(4, requires_grad=True)\ngot = w.gather(0, torch.tensor(1), sparse_grad=True)",
    "sparse-embedding": "got = torch.nn.functional.embedding(torch.tensor([1]), x, sparse=True)",
    "sparse-embedding-by-place": (
        "got = torch.nn.functional.embedding(torch.tensor([1]), x, None, None, 2.0, False, True)"
    ),
    "sparse-embedding-of-torch": "got = torch.embedding(x, torch.tensor([1]), -1, False, True)",
    "sparse-layer": "got = torch.nn.Embedding(3, 3, sparse=True)",
    "sparse-layer-by-place": "got = torch.nn.Embedding(3, 3, None, None, 2.0, False, True)",
    "sparse-layer-super": (
        "class E(torch.nn.Embedding):\n    def __init__(self): super().__init__(3, 3, sparse=True)\ngot = E()"
    ),
    "sparse-layer-derived": "class E(torch.nn.Embedding): pass\ngot = E(3, 3, sparse=True)",
    "out-after-an-error": "o = torch.zeros(0)\ntorch.gather(x, 0, torch.full((9, 4), 10**9), out=o)\ngot = o",
    "out-by-place-norm": "o = torch.zeros(0)\ngot = torch.norm(x, 2, 0, False, o)",
    "out-by-place-normalize": "o = torch.zeros(0)\ngot = torch.nn.functional.normalize(x, 2, 0, 1e-9, o)",
    "out-by-place-tensordot": "o = torch.zeros(0)\ngot = torch.tensordot(x, x, 2, o)",
    "where-of-numpy": "import numpy\ngot = numpy.add(numpy.zeros(9), 0, where=numpy.zeros(9, dtype=bool))",
    # Types of numpy that are no numbers.
    "numpy-object-zeros": "import numpy\ngot = numpy.zeros(3, dtype='O')",
    "numpy-object-by-place": "import numpy\ngot = numpy.array([1], 'object')",
    "numpy-object-astype": "import numpy\ngot = numpy.ones(3).astype('O')",
    "numpy-object-class": "import numpy\ngot = numpy.zeros(3, dtype=object)",
    "numpy-object-dtype": "import numpy\ngot = numpy.dtype('O')",
    "numpy-object-of-long-number": "import numpy\ngot = numpy.power([10**30], 10**8)",
    "numpy-object-of-none": "import numpy\ngot = numpy.array([None])",
    "numpy-object-of-own": "import numpy\nclass A: pass\ngot = numpy.array([A()])",
    "numpy-structured": "import numpy\ngot = numpy.zeros(3, dtype='i4,O')",
    "numpy-structured-list": "import numpy\ngot = numpy.zeros(3, dtype=[('a', 'O')])",
    "numpy-subarray": "import numpy\ngot = numpy.zeros(3, dtype='(1000,1000)f8')",
    "numpy-text-astype": "import numpy\ngot = numpy.zeros(1000).astype('U80000')",
    "numpy-text-full": "import numpy\ngot = numpy.full(1000, 'a', dtype='U80000')",
    "numpy-text-long": "import numpy\ngot = numpy.full(1000, 'x' * 80_000)",
    "numpy-text-array": "import numpy\ngot = numpy.array(['a' * 80_000] + [''] * 999)",
    "numpy-void": "import numpy\ngot = numpy.zeros(1, dtype='V80000')",
    # Sizes in other clothes: the budget of these tests is 128 MiB.
    "size-of-numpy-ones": "import numpy\ngot = numpy.ones(numpy.int64(40_000_000))",
    "size-of-numpy-list": "import numpy\nn = numpy.int64(10_000)\ngot = numpy.ones([n, n])",
    "size-of-numpy-tensor": "import numpy\ngot = numpy.ones(torch.tensor(40_000_000))",
    "size-of-numpy-eye": "import numpy\ngot = numpy.eye(numpy.int64(6000))",
    "size-of-numpy-one-hot": "import numpy\ngot = torch.nn.functional.one_hot(torch.tensor([0]), numpy.int64(40_000_000))",
    "size-of-numpy-repeat": "import numpy\ngot = numpy.repeat(numpy.ones(1), numpy.array([40_000_000]))",
    "size-of-numpy-bincount": "import numpy\ngot = numpy.bincount([40_000_000])",
    "size-of-numpy-repeat-interleave": "import numpy\ngot = torch.ones(1).repeat_interleave(numpy.int64(80_000_000))",
    "size-of-layer": "import numpy\ngot = torch.nn.Linear(numpy.int64(9000), numpy.int64(9000))",
    "size-of-layer-norm": "got = torch.nn.LayerNorm([9000, 9000])",
    "size-of-layer-super": (
        "class L(torch.nn.Linear):\n    def __init__(self): super().__init__(9000, 9000)\ngot = L()"
    ),
    "size-of-layer-derived": "class L(torch.nn.Linear): pass\ngot = L(9000, 9000)",
    "size-of-layer-mapped": "class L(torch.nn.Linear): pass\ngot = list(map(L, [9000], [9000]))",
    "times-of-numpy": "import numpy\ngot = 'a' * numpy.int64(10**10)",
    "times-of-numpy-list": "import numpy\ngot = numpy.int64(10**10) * [0]",
    "times-of-tensor": "got = 'a' * torch.tensor(10**10)",
    "kept-small-tensors": "got = [x + 1 for x in [torch.zeros(16_000)] * 4000]",
    "kept-empty-tensors": "a = torch.zeros(0)\ngot = [a + 1 for i in range(20_000) for j in range(50)]",
    "kept-accumulated": "import itertools\ngot = list(itertools.accumulate(itertools.repeat('a' * 100_000, 80)))",
    "kept-lists-written-out": "got = [[" + "0, " * 2000 + "] for _ in range(15_000)]",
    "kept-dicts-written-out": "got = [{"
    + ", ".join(f"{n}: 0" for n in range(300))
    + "} for _ in range(15_000)]",
    "format-many-widths": "got = ('{0:9999}' * 30_000).format(1)",
    "percent-many-widths": "got = ('%9999s' * 30_000) % ((1,) * 30_000)",
    # Numbers whose arithmetic takes as long as one likes.
    "int-of-hex": "got = int('f' * 10_000_000, 16)",
    "int-of-bytes": "got = int(b'f' * 10_000_000, 16)",
    "int-of-hex-division": "n = int('f' * 3_000_000, 16)\ngot = n // int('f' * 1_500_000, 16)",
    "int-mapped": "got = list(map(int, ['1' * 1_000_000], [2]))",
    "divmod": "n = int('f' * 3_000_000, 16)\ngot = divmod(n, n // 3)",
    "gcd": "import math\ngot = math.gcd(int('f' * 3_000_000, 16), 7)",
    "lcm": "import math\nn = 3 ** 60_000\ngot = math.lcm(n, n + 1)",
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
    "encode-unknown": "got = 'a'.encode('x' * 10_000)",
    "decode-unknown": "got = b'a'.decode('idna')",
    "str-of-bytes-unknown": "got = str(b'a', 'rot13')",
    "bytes-unknown": "got = bytes('a', 'punycode')",
    "encode-errors-unknown": "got = 'a'.encode('ascii', 'namereplace')",
}
