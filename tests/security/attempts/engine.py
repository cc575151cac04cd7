"""Objects of the engine: modules, weights, the values of other requests, the interleaver."""

from __future__ import annotations

ATTEMPTS = {
    "module": "got = model._module",
    "module-by-get": "got = model.get('layer1._module')",
    "weight": "got = model.layer1.weight",
    "weight-written": "model.layer1.weight[:] = 0\ngot = 1",
    "parameters": "got = list(model.parameters())",
    "state-dict": "got = model.state_dict()",
    "interleaver": "got = model.interleaver",
    "mediators": "got = tracer.mediators",
    "backend": "got = tracer.backend",
    "function-of-tracer": "got = tracer.function",
    "to": "model.to('meta')\ngot = 1",
    "source": "got = model.layer1.source",
    "edit": "with model.edit():\n    pass\ngot = 1",
    "interleave": "model.interleave(print)\ngot = 1",
    "module-replaced": "model.layer1 = torch.nn.Linear(5, 10)\ngot = 1",
    "attribute-set": "model.anything = 1\ngot = 1",
    "cache-item-hidden": "cache = tracer.cache()\ngot = cache.model['_module']",
    "save-of-globals": "got = save(save).__self__",
    "print-to-file": "print('touched', file=open(canary, 'w'))",
    "local-part": "with tracer.local():\n    got = 1",
    "hook": "got = model.layer1(torch.ones(1, 5), hook=True).grad_fn",
}
ATTEMPTS |= {
    "trace-with-a-class-of-ours": "def f(function, *args, **kwargs): return function\ngot = model.trace(x, tracer_cls=f)",
    "trace-of-own-object": "class Thief: pass\ngot = model.trace(Thief())",
    "module-in-inputs": "got = model.inputs[1].get('module')._modules",
    "layer-of-ours-on-own-object": (
        "class Thief:\n    def __rmatmul__(self, weight): return weight\ngot = torch.nn.Linear(1, 1)(Thief())"
    ),
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
