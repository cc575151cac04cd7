"""Walks along attributes: from an object in reach to its class, its globals, its frame."""

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
}
