"""Objects of the engine: modules, weights, the values of other requests, the interleaver."""

from __future__ import annotations

ATTEMPTS = {
    "module": "got = model._module",
    "module-of-child": "got = model.layer1._module",
    "module-by-getattr": "got = getattr(model, '_module')",
    "module-by-item": "got = model['_module']",
    "module-by-get": "got = model.get('layer1._module')",
    "module-by-get-dunder": "got = model.get('layer1.__class__')",
    "weight": "got = model.layer1.weight",
    "weight-by-item": "got = model.layer1['weight']",
    "weight-by-get": "got = model.get('layer1.weight')",
    "weight-written": "model.layer1.weight[:] = 0\ngot = 1",
    "weight-augmented": "model.layer1.weight += 1\ngot = 1",
    "parameters": "got = list(model.parameters())",
    "state-dict": "got = model.state_dict()",
    "forward": "got = model.forward",
    "interleaver": "got = model.interleaver",
    "interleaver-of-tracer": "got = tracer.interleaver",
    "interleaver-state": "got = tracer.interleaver.mediators",
    "mediators": "got = tracer.mediators",
    "batcher": "got = tracer.batcher",
    "backend": "got = tracer.backend",
    "info": "got = tracer.info.globals_",
    "function-of-tracer": "got = tracer.function",
    "root": "got = model._root",
    "to": "model.to('meta')\ngot = 1",
    "cpu": "model.layer1.cpu()\ngot = 1",
    "source": "got = model.layer1.source",
    "edit": "with model.edit():\n    pass\ngot = 1",
    "clear-edits": "model.clear_edits()\ngot = 1",
    "interleave": "model.interleave(print)\ngot = 1",
    "module-replaced": "model.layer1 = torch.nn.Linear(5, 10)\ngot = 1",
    "attribute-set": "model.anything = 1\ngot = 1",
    "attribute-of-tracer-set": "tracer.args = ()\ngot = 1",
    "output-class": "got = model.layer1.output.__class__",
    "iter-interleaver": "got = tracer.iter.interleaver",
    "barrier-interleaver": "got = tracer.barrier(1).interleaver",
    "cache-hidden": "cache = tracer.cache()\ngot = cache._envoy",
    "cache-item-hidden": "cache = tracer.cache()\ngot = cache.model['_module']",
    "cache-path-hidden": "cache = tracer.cache()\ngot = cache['model._module']",
    "fake-value": "got = model.fake_value",
    "save-of-globals": "got = save(save).__self__",
    "print-to-file": "print('touched', file=open(canary, 'w'))",
    "local-part": "with tracer.local():\n    got = 1",
    "events": "got = tracer.iter[:].interleaver.current",
    "hook": "got = model.layer1(torch.ones(1, 5), hook=True).grad_fn",
    "device-of-weights": "got = model.devices",
}
ATTEMPTS |= {
    "trace-with-a-class-of-ours": "def f(function, *args, **kwargs): return function\ngot = model.trace(x, tracer_cls=f)",
    "trace-of-own-object": "class Thief: pass\ngot = model.trace(Thief())",
    "invoke-of-own-object": "class Thief: pass\ngot = tracer.invoke(Thief())",
    "module-in-inputs": "got = model.inputs[1].get('module')._modules",
    "layer-of-ours-on-own-object": (
        "class Thief:\n    def __rmatmul__(self, weight): return weight\ngot = torch.nn.Linear(1, 1)(Thief())"
    ),
    "map-of-own-object": (
        "class Thief:\n    def __radd__(self, weight): return weight\n"
        "got = list(filter(model.layer2, [Thief()]))"
    ),
    "sort-by-module": "class Thief: pass\ngot = sorted([Thief(), Thief()], key=model.layer1)",
    "default-by-module": "import collections\ngot = collections.defaultdict(model.layer1)['a']",
    "property-of-module": "class Thief:\n    weight = property(model.layer1)\ngot = Thief().weight",
    "method-of-module": "class Thief:\n    weight = staticmethod(model.layer1)\ngot = Thief().weight(Thief())",
    "cached-module": "import functools\nclass Thief: pass\ngot = functools.lru_cache(model.layer1)(Thief())",
    "reduce-by-module": "import functools\nclass Thief: pass\ngot = functools.reduce(model.layer1, [Thief()], Thief())",
    "own-object-in-inputs": """
class Thief:
    def __radd__(self, weight): return weight
inputs = model.layer1.inputs
inputs[1]['more'] = Thief()
got = model.layer1.output is None
""",
    "own-object-after-the-check": """
class Thief: pass
values = [torch.ones(1, 10)]
model.layer1.output = values
values[0] = Thief()
got = isinstance(model.layer1.output, list) and isinstance(model.layer1.output[0], Thief)
""",
    "own-object-in-an-array": """
import numpy
class Thief:
    def __rmul__(self, weight): return weight
model.layer1.output = numpy.array([Thief()], dtype=object)
got = 1
""",
    **{
        f"block-in-a-{name}": f"""
{before}
loss = model.layer1.output.requires_grad_().sum()
got = f(loss)
"""
        for name, before in {
            "method-module": """
class A:
    def read(self, loss):
        with loss.backward():
            found = [model._module]
        return found
f = A().read""",
            "method-builtins": """
class A:
    def read(self, loss):
        with loss.backward():
            function = tracer.info.block.function({}, None, {'__name__': 'a'})
        return function
f = A().read""",
            "method-loop": """
class A:
    def read(self, loss):
        with loss.backward():
            while True: pass
f = A().read""",
            "nested-class-method": """
def make():
    class A:
        def read(self, loss):
            class B:
                def read(self, loss):
                    with loss.backward():
                        found = model.layer1.weight
                    return found
            return B().read(loss)
    return A()
f = make().read""",
        }.items()
    },
}
