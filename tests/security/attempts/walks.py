"""Walks along attributes: from an object in reach to its class, its globals, its frame."""

ATTEMPTS = {
    "class": "got = x.__class__.__name__",
    "subclasses": "got = ().__class__.__base__.__subclasses__()",
    "mro": "got = type(x).mro()",
    "mro-dunder": "got = type(x).__mro__",
    "bases": "class A: pass\ngot = A.__bases__",
    "class-dict": "class A: pass\ngot = A.__dict__",
    "instance-dict": "class A: pass\ngot = A().__dict__['a']",
    "globals-of-own": "def f(): pass\ngot = f.__globals__",
    "globals-of-lambda": "got = (lambda: 0).__globals__['__builtins__']",
    "globals-of-save": "got = save.__globals__",
    "globals-of-torch": "got = torch.relu.__globals__",
    "builtins-of-function": "def f(): pass\ngot = f.__builtins__",
    "code": "def f(): pass\ngot = f.__code__",
    "closure": "def f(): return x\ngot = f.__closure__[0].cell_contents",
    "defaults": "def f(a=1): pass\nf.__defaults__ = (2,)",
    "self-of-builtin": "got = len.__self__",
    "self-of-method": "got = x.sum.__self__.__class__",
    "module-of-builtin": "got = print.__module__.__class__",
    "func-of-method": "class A:\n    def f(self): pass\ngot = A().f.__func__.__globals__",
    "getattr-dunder": "got = getattr(x, '__class__')",
    "getattr-built-name": "got = getattr(x, '__cl' + 'ass__')",
    "getattr-subclassed-name": "class S(str): pass\ngot = getattr(x, S('__class__'))",
    "getattr-of-getattr": "got = [getattr, hasattr][0](x, chr(95) * 2 + 'class' + chr(95) * 2)",
    "hasattr-says-no": "got = hasattr(x, '__class__') or hasattr(x, 'data_ptr')",
    "map-getattr": "got = list(map(getattr, [x], ['__class__']))",
    "setattr-class": "class A: pass\na = A()\nsetattr(a, '__class__', type)\ngot = a",
    "vars": "got = vars(torch)",
    "vars-of-function": "def f(): pass\ngot = vars(f)",
    "dir-finds-nothing-hidden": "got = any(name.startswith('_') for name in dir(x))",
    "globals-call": "got = globals()",
    "locals-call": "got = locals()",
    "generator-frame": "g = (i for i in [1])\ngot = g.gi_frame",
    "generator-frame-back": "g = (i for i in [1])\nnext(g)\ngot = g.gi_frame.f_back.f_globals",
    "generator-code": "g = (i for i in [1])\ngot = g.gi_code",
    "generator-by-getattr": "g = (i for i in [1])\ngot = getattr(g, 'gi_frame')",
    "traceback": "try:\n    1 / 0\nexcept Exception as error:\n    got = error.__traceback__.tb_frame",
    "traceback-by-getattr": (
        "try:\n    1 / 0\nexcept Exception as error:\n    got = getattr(error, '__trace' + 'back__')"
    ),
    "with-traceback": "try:\n    1 / 0\nexcept Exception as error:\n    got = error.with_traceback(None)",
    "error-context": "try:\n    1 / 0\nexcept Exception as error:\n    got = error.__context__.__class__",
    "error-object": "try:\n    x.nothing\nexcept AttributeError as error:\n    got = error.obj",
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
    "coroutine": "async def f(): pass\ngot = f().cr_frame",
    "async-generator": "async def f(): yield 1\ngot = f().ag_frame",
    "property-getter": "class A:\n    @property\n    def f(self): return 1\ngot = A.f.fget.__globals__",
    "partial-func": "import functools\ngot = functools.partial(save, 1).func",
    "wrapped": "import functools\n@functools.lru_cache\ndef f(): pass\ngot = f.__wrapped__",
    "name-mangled": "class A:\n    def f(self): return self.__class__\ngot = A().f()",
    "class-cell": "class A:\n    def f(self): return __class__\ngot = A().f().__mro__",
    "super-object": "class A:\n    def f(self): return super()\ngot = A().f().__thisclass__",
    "super-getattribute": "class A:\n    def f(self): return super().__getattribute__('__class__')\ngot = A().f()",
    "super-with-arguments": "class A: pass\ngot = super(A, A()).__init__",
    "super-of-torch": (
        "class M(torch.nn.Module):\n    def f(self): return super().__getattr__('_modules')\ngot = M().f()"
    ),
    "super-reduce": "class A:\n    def f(self): return super().__reduce_ex__(2)\ngot = A().f()",
    "type-of-function": "def f(): pass\ngot = type(f)(f, {})",
    "type-of-type": "got = type(type(x))('A', (), {})",
    "type-with-three": "got = type('A', (), {})",
    "type-of-module": "got = type(torch)('os')",
    "type-of-envoy": "got = type(model)(torch.nn.Linear(1, 1))",
    "dunder-in-string-call": "got = operator.attrgetter('__class__')(x)",
    "attrgetter": "import operator\ngot = operator.attrgetter('__class__')(x)",
    "methodcaller": "import operator\ngot = operator.methodcaller('__reduce__')(x)",
    "itemgetter-on-model": "import operator\ngot = operator.itemgetter('_module')(model)",
    "string-template": "import string\ngot = string.Formatter().format('{0.__class__}', x)",
    "doc": "got = x.__doc__",
    "annotations": "def f(a: int): pass\ngot = f.__annotations__",
    "match-class": "match x:\n    case object(__class__=kind):\n        got = kind",
    "match-keys": "match {'a': 1}:\n    case {'a': got}:\n        pass",
    "reduce": "got = x.__reduce_ex__(2)",
    "init-subclass": "class A:\n    def __init_subclass__(cls): pass\ngot = A",
    "file-of-module": "got = torch.__file__",
    "loader-of-module": "got = torch.__loader__",
    "spec-of-module": "got = torch.__spec__.loader",
}
