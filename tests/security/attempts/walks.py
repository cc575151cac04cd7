"""Walks along attributes, from an object in reach to its class, globals and frame; classes of the block's own."""

ATTEMPTS = {
    "class": "got = x.__class__.__name__",
    "subclasses": "got = ().__class__.__base__.__subclasses__()",
    "globals-of-own": "def f(): pass\ngot = f.__globals__",
    "builtins-of-function": "def f(): pass\ngot = f.__builtins__",
    "closure": "def f(): return x\ngot = f.__closure__[0].cell_contents",
    "self-of-builtin": "got = len.__self__",
    "getattr-built-name": "got = getattr(x, '__cl' + 'ass__')",
    "map-getattr": "got = list(map(getattr, [x], ['__class__']))",
    "generator-frame-back": "g = (i for i in [1])\nnext(g)\ngot = g.gi_frame.f_back.f_globals",
    "traceback-by-getattr": (
        "try:\n    1 / 0\nexcept Exception as error:\n    got = getattr(error, '__trace' + 'back__')"
    ),
    "exit-traceback": """
class Context:
    def __enter__(self): return self
    def __exit__(self, kind, error, trace):
        self.trace = trace
        return True
context = Context()
with context:
    1 / 0
got = context.trace
""",
    "property-getter": "class A:\n    @property\n    def f(self): return 1\ngot = A.f.fget.__globals__",
    "super-getattribute": "class A:\n    def f(self): return super().__getattribute__('__class__')\ngot = A().f()",
    "type-of-function": "def f(): pass\ngot = type(f)(f, {})",
    "type-of-type": "got = type(type(x))('A', (), {})",
    "reduce": "got = x.__reduce_ex__(2)",
    "loader-of-module": "got = torch.__loader__",
    # Classes that libraries would trust.
    "metaclass": "class M(type): pass\ngot = M",
    "array-interface": """
class A:
    @property
    def __array_interface__(self):
        return {'shape': (64,), 'typestr': '|u1', 'data': (4096, True), 'version': 3}
import numpy
got = numpy.asarray(A())
""",
    "array-interface-by-setattr": """
class A: pass
a = A()
setattr(a, '__array_interface__', {'shape': (64,), 'typestr': '|u1', 'data': (4096, True), 'version': 3})
import numpy
got = numpy.asarray(a)
""",
    "dlpack": "class A:\n    def __dlpack__(self): return 1\ngot = A",
    "buffer": "class A:\n    def __buffer__(self, flags): return 1\ngot = A",
    "torch-function": "class A:\n    def __torch_function__(self, func, types, args=(), kwargs=None): return func\ngot = A",
    "reduce-of-own": "class A:\n    def __reduce__(self): return (print, ('ran',))\ngot = A()",
    "setstate": "class A:\n    def __setstate__(self, state): pass\ngot = A()",
    "class-property": "class A:\n    @property\n    def __class__(self): return int\ngot = isinstance(A(), int)",
    "getattribute": "class A:\n    def __getattribute__(self, name): return name\ngot = A()",
    "del": "class A:\n    def __del__(self): pass\ngot = A()",
    "descriptor-get": "class D:\n    def __get__(self, owner, kind): return kind\ngot = D",
    "mro-entries": "class A:\n    def __mro_entries__(self, bases): return (type,)\nclass B(A()): pass\ngot = B",
    "derive-from-type": "class A(type): pass\ngot = A",
    "derive-from-tensor": "class A(torch.Tensor): pass\ngot = A",
    "derive-from-ndarray": "import numpy\nclass A(numpy.ndarray): pass\ngot = A",
    "decorator-that-calls": "@model\ndef f(): pass\ngot = f",
    "dataclass-slots": "import dataclasses\n@dataclasses.dataclass(slots=True)\nclass A:\n    a: int\ngot = A",
    "module-hooks": "m = torch.nn.Linear(1, 1)\nm.register_forward_hook(print)\ngot = 1",
    "module-apply": "m = torch.nn.Linear(1, 1)\nm.apply(print)\ngot = 1",
    "own-model-to-the-model": """
class Thief:
    def __rmatmul__(self, weight): return weight
    def __rmul__(self, weight): return weight
    def __radd__(self, weight): return weight
got = model.layer1(Thief())
""",
    "own-model-as-output": "class Thief: pass\nmodel.layer1.output = Thief()\ngot = 1",
}
