"""Classes that libraries would trust: special methods, metaclasses, descriptors, decorators, bases."""

ATTEMPTS = {
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
    "reduce": "class A:\n    def __reduce__(self): return (print, ('ran',))\ngot = A()",
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
