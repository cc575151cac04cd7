"""The other roads of Python: imports, builtins, formats, names, and errors that are swallowed."""

ATTEMPTS = {
    "line-of-a-file": "import linecache\ngot = linecache.getline(canary, 1)",
    "traceback-of-a-file": """
import traceback
try:
    exec(compile('1 / 0', canary, 'exec'))
except ZeroDivisionError as error:
    got = traceback.extract_tb(error.__traceback__)[-1].line
""",
    "open": "got = open(canary).read()",
    "open-write": "open(canary, 'w').write('touched')",
    "eval": "got = eval('1 + 1')",
    "exec": "exec('got = 1')",
    "compile": "got = compile('1', 'f', 'eval')",
    "import-function": "got = __import__('os')",
    "input": "got = input()",
    "breakpoint": "breakpoint()",
    "exit": "exit()",
    "help": "got = help('os')",
    "memoryview": "got = memoryview(b'abc')",
    "import-os": "import os\nos.system('touch ' + canary)",
    "import-sys": "import sys\ngot = sys.modules",
    "import-os-path": "import os.path as path\ngot = path",
    "import-posix": "from posix import system\nsystem('touch ' + canary)",
    "import-io": "from io import open\ngot = open(canary)",
    "import-pathlib": "import pathlib\npathlib.Path(canary).write_text('touched')",
    "import-subprocess": "import subprocess\nsubprocess.run(['touch', canary])",
    "import-socket": "import socket\nsocket.create_connection(('127.0.0.1', port))",
    "import-ctypes": "import ctypes\ngot = ctypes.CDLL(None)",
    "import-threading": "import threading\nthreading.Thread(target=print).start()",
    "import-signal": "import signal\nsignal.raise_signal(9)",
    "import-gc": "import gc\ngot = gc.get_objects()",
    "import-inspect": "import inspect\ngot = inspect.currentframe()",
    "import-importlib": "import importlib\ngot = importlib.import_module('os')",
    "import-pickle": "import pickle\ngot = pickle.loads(b'cos\\nsystem\\n(S\"true\"\\ntR.')",
    "import-builtins": "import builtins\ngot = builtins.open(canary)",
    "import-main": "import __main__\ngot = __main__",
    "import-types": "import types\ngot = types.FunctionType",
    "import-weakref": "import weakref\ngot = weakref",
    "import-mmap": "import mmap\ngot = mmap",
    "import-multiprocessing": "from multiprocessing import shared_memory\ngot = shared_memory",
    "import-nnsight-engine-module": "import nnsight_engine.core.object_methods as mounting\ngot = mounting.ctypes",
    "import-nnsight-engine-member": "from nnsight_engine import LanguageModel\ngot = LanguageModel",
    "import-star": "from torch import *\ngot = 1",
    "import-relative": "from . import os\ngot = os",
    "import-hidden-name": "from torch import _C\ngot = _C",
    "import-through-torch": "from torch import os\ngot = os",
    "import-submodule-loaded": "from torch import utils\ngot = utils",
    "import-as-dunder": "import math as __builtins__\ngot = 1",
    "import-json": "import json\njson.dump(1, json)",
    "import-transformers": "import transformers\ngot = transformers",
    "import-collections-sys": "from collections import _sys\ngot = _sys",
    "import-random-os": "from random import _os\ngot = _os",
    "random-class": "import random\ngot = random.SystemRandom",
    "random-getstate-module": "import random\ngot = random._inst",
    "statistics-sys": "import statistics\ngot = statistics.sys",
    "dataclasses-sys": "import dataclasses\ngot = dataclasses.sys",
    "functools-update-wrapper": "import functools\ngot = functools.update_wrapper",
    "functools-wraps-assigned": """
import functools
def f(): pass
class A: pass
a = A()
functools.wraps(f, assigned=('__globals__',))(a)
got = a
""",
    "functools-reduce-getattr": "import functools\ngot = functools.reduce(getattr, ['__class__', '__base__'], x)",
    "contextlib-sys": "import contextlib\ngot = contextlib.sys",
    "contextlib-exit-stack": "import contextlib\ngot = contextlib.ExitStack()",
    "enum-sys": "import enum\ngot = enum.sys",
    "time-sleep": "import time\ntime.sleep(1)",
    "typing-hints": "import typing\ngot = typing.get_type_hints",
    "typing-sys": "import typing\ngot = typing.sys",
    "typing-forward-reference": "import typing\ngot = typing.ForwardRef('1')._evaluate({}, {}, set())",
    "namedtuple-module": "import collections\ngot = collections.namedtuple('A', 'a', module='os')",
    "make-dataclass": "import dataclasses\ngot = dataclasses.make_dataclass('A', ['a'])",
    "format-attribute": "got = '{0.__class__}'.format(x)",
    "format-globals": "def f(): pass\ngot = '{0.__globals__}'.format(f)",
    "format-index": "got = '{0[0].__class__.__mro__}'.format([x])",
    "format-map": "got = '{x.__class__}'.format_map({'x': x})",
    "format-of-class": "got = str.format('{0.__class__}', x)",
    "format-by-map": "got = list(map('{0.__class__}'.format, [x]))",
    "format-by-getattr": "got = getattr('{0.__class__}', 'format')(x)",
    "format-nested": "got = '{0:{1.__class__}}'.format(1, x)",
    "format-f-string": "got = f'{x.__class__}'",
    "format-f-string-nested": "got = f'{1:{x.__class__}}'",
    "format-percent-key": "got = '%(a)s' % {'a': x}.__class__",
    "assign-builtins": "__builtins__ = {}\ngot = 1",
    "assign-name": "__name__ = 'os'\ngot = 1",
    "global-builtins": "global __builtins__\n__builtins__ = 1\ngot = 1",
    "walrus-dunder": "got = (__builtins__ := 1)",
    "argument-dunder": "def f(__builtins__): return __builtins__\ngot = f(1)",
    "for-dunder": "for __builtins__ in [1]: pass\ngot = 1",
    "except-dunder": "try:\n    1 / 0\nexcept Exception as __builtins__:\n    got = 1",
    "read-builtins": "got = __builtins__",
    "keyword-dunder": "def f(**kw): return kw\ngot = f(__class__=1)",
    "guard-name": "got = vars()['get!']",
    "finally-return": """
def f():
    try:
        while True: pass
    finally:
        return 1
got = f()
""",
    "finally-continue": "while True:\n    try:\n        while True: pass\n    finally:\n        continue",
    "finally-nested-function": """
def f():
    try:
        while True: pass
    finally:
        [g() for _ in range(10)]
def g():
    try:
        while True: pass
    finally:
        f()
f()
""",
    "except-base": "try:\n    while True: pass\nexcept BaseException:\n    got = 1",
    "except-bare": "while True:\n    try:\n        while True: pass\n    except:\n        pass",
    "except-star": "try:\n    while True: pass\nexcept* Exception:\n    got = 1",
    "except-expression": "try:\n    while True: pass\nexcept (Exception, ValueError):\n    got = 1",
    "suppress": "import contextlib\nwith contextlib.suppress(Exception):\n    while True: pass\ngot = 1",
    "exit-swallows": """
class Context:
    def __enter__(self): return self
    def __exit__(self, *error): return True
while True:
    with Context():
        while True: pass
""",
    "contextmanager-swallows": """
import contextlib
@contextlib.contextmanager
def calm():
    try:
        yield
    except:
        pass
while True:
    with calm():
        while True: pass
""",
    "generator-finally-yields": """
def g():
    try:
        while True: pass
    finally:
        yield 1
for i in g(): pass
got = True
""",
    "system-exit": "raise SystemExit(1)",
    "keyboard-interrupt": "raise KeyboardInterrupt",
    "generator-exit": "raise GeneratorExit",
    "raise-from-class": "class E(BaseException): pass\nraise E",
}
