"""Classes that libraries would trust: special methods, metaclasses, descriptors, decorators, bases."""

ATTEMPTS = {
    "metaclass": "class M(type): pass\ngot = M",
    "metaclass-keyword": "class A(metaclass=type): pass\ngot = A",
    "class-keyword": "class A(a=1): pass\ngot = A",
    "array-interface": """
class A:
    @property
    def __array_interface__(self):
        return {'shape': (64,), 'typestr': '|u1', 'data': (4096, True), 'version': 3}
import numpy
got = numpy.asarray(A())
""",
    "array-interface-attribute": "class A:\n    __array_interface__ = {}\ngot = A",
    "array-interface-by-setattr": """
class A: pass
a = A()
setattr(a, '__array_interface__', {'shape': (64,), 'typestr': '|u1', 'data': (4096, True), 'version': 3})
import numpy
got = numpy.asarray(a)
""",
    "array-method": "class A:\n    def __array__(self): return 1\ngot = A",
    "dlpack": "class A:\n    def __dlpack__(self): return 1\ngot = A",
    "buffer": "class A:\n    def __buffer__(self, flags): return 1\ngot = A",
    "torch-function": "class A:\n    def __torch_function__(self, func, types, args=(), kwargs=None): return func\ngot = A",
    "reduce": "class A:\n    def __reduce__(self): return (print, ('ran',))\ngot = A()",
    "getstate": "class A:\n    def __getstate__(self): return 1\ngot = A()",
    "setstate": "class A:\n    def __setstate__(self, state): pass\ngot = A()",
    "deepcopy": "class A:\n    def __deepcopy__(self, memo): return memo\ngot = A()",
    "class-attribute": "class A:\n    __class__ = int\ngot = A()",
    "class-property": "class A:\n    @property\n    def __class__(self): return int\ngot = isinstance(A(), int)",
    "getattribute": "class A:\n    def __getattribute__(self, name): return name\ngot = A()",
    "getattr-method": "class A:\n    def __getattr__(self, name): return name\ngot = A()",
    "setattr-method": "class A:\n    def __setattr__(self, name, value): pass\ngot = A()",
    "del": "class A:\n    def __del__(self): pass\ngot = A()",
    "new": "class A:\n    def __new__(cls): return 1\ngot = A()",
    "slots": "class A:\n    __slots__ = ('a',)\ngot = A()",
    "descriptor-get": "class D:\n    def __get__(self, owner, kind): return kind\ngot = D",
    "descriptor-set-name": "class D:\n    def __set_name__(self, owner, name): pass\ngot = D",
    "subclass-hook": "class A:\n    @classmethod\n    def __subclasshook__(cls, other): return True\ngot = A",
    "instancecheck": "class A:\n    def __instancecheck__(self, other): return True\ngot = A",
    "mro-entries": "class A:\n    def __mro_entries__(self, bases): return (type,)\nclass B(A()): pass\ngot = B",
    "prepare": "class A:\n    @classmethod\n    def __prepare__(cls, *args): return {}\ngot = A",
    "class-getitem": "class A:\n    def __class_getitem__(cls, item): return cls\ngot = A[1]",
    "dir": "class A:\n    def __dir__(self): return 1\ngot = A",
    "format-method": "class A:\n    def __format__(self, spec): return spec\ngot = f'{A()}'",
    "missing-assigned": "class A: pass\nA.__call__ = lambda self: 1\ngot = A()()",
    "magic-assigned-in-body": "class A:\n    __call__ = print\ngot = A()",
    "derive-from-type": "class A(type): pass\ngot = A",
    "derive-from-type-of": "class A(type(x)): pass\ngot = A",
    "derive-from-tensor": "class A(torch.Tensor): pass\ngot = A",
    "derive-from-str": "class A(str): pass\ngot = A('a') * 10**12",
    "derive-from-int": "class A(int): pass\ngot = A(9) ** 10**10",
    "derive-from-ndarray": "import numpy\nclass A(numpy.ndarray): pass\ngot = A",
    "derive-from-module-view": "class A(torch): pass\ngot = A",
    "derive-from-envoy": "class A(model): pass\ngot = A",
    "derive-from-function": "class A(save): pass\ngot = A",
    "decorator-that-calls": "@model\ndef f(): pass\ngot = f",
    "decorator-open": "@open\ndef f(): pass\ngot = f",
    "decorator-on-class": "@eval\nclass A: pass\ngot = A",
    "staticmethod-of-envoy": "class A:\n    f = property(model)\ngot = A().f",
    "dataclass-slots": "import dataclasses\n@dataclasses.dataclass(slots=True)\nclass A:\n    a: int\ngot = A",
    "dataclass-of-another": "import dataclasses\ngot = dataclasses.dataclass(Exception)",
    "abc-register": "from abc import ABC\nclass A(ABC): pass\nA.register(int)\ngot = 1",
    "enum-call": "from enum import Enum\ngot = Enum('A', 'a', module='os')",
    "module-hooks": "m = torch.nn.Linear(1, 1)\nm.register_forward_hook(print)\ngot = 1",
    "module-internals": "m = torch.nn.Linear(1, 1)\ngot = m._modules",
    "module-apply": "m = torch.nn.Linear(1, 1)\nm.apply(print)\ngot = 1",
    "module-compile": "m = torch.nn.Linear(1, 1)\nm.compile()\ngot = 1",
    "module-share-memory": "m = torch.nn.Linear(1, 1)\nm.share_memory()\ngot = 1",
    "module-setattr-dunder": "m = torch.nn.Linear(1, 1)\nm.__class__ = int\ngot = 1",
    "module-call-impl": "m = torch.nn.Linear(1, 1)\ngot = m._call_impl",
    "own-model-to-the-model": """
class Thief:
    def __rmatmul__(self, weight): return weight
    def __rmul__(self, weight): return weight
    def __radd__(self, weight): return weight
got = model.layer1(Thief())
""",
    "own-model-by-map": """
class Thief:
    def __rmatmul__(self, weight): return weight
got = list(map(model.layer1, [Thief()]))
""",
    "own-model-by-partial": """
import functools
class Thief: pass
got = functools.partial(model.layer1, Thief())()
""",
    "own-model-as-output": "class Thief: pass\nmodel.layer1.output = Thief()\ngot = 1",
    "own-model-in-a-list-as-output": "class Thief: pass\nmodel.layer1.output = [Thief()]\ngot = 1",
}
