"""Blocks that people write, none of which the sandbox may change: what they save is the same with and without.

They use what may be missing in a confined process: modules, the engine's own API, and what generates code.
Each finds ``x`` (3 by 4), ``model`` (two layers, 5 -> 10 -> 2) and ``tracer``.
"""

from __future__ import annotations

from typing import Any

import torch

from nnsight_engine import NNsight
from nnsight_engine.sandbox.block_checker import MODULES
from nnsight_engine.serialization.limits import Policy
from tests.security.host import Small, message_of, run

BLOCKS = {
    "save": "hidden = model.layer1.output.save()",
    "input": "given = model.layer1.input.save()\nrest = save(model.layer1.inputs[0][0])",
    "replace": "model.layer1.output = model.layer1.output * 2\nout = model.output.save()",
    "in-place": "model.layer1.output[:] = 0\nout = model.output.save()",
    "augmented-attribute": "model.layer1.output += 1\nout = model.output.save()",
    "apply-module": "h = model.layer1.output\nout = model.layer2(torch.relu(h)).save()",
    "skip": "model.layer1.skip(torch.ones(1, 10))\nout = model.output.save()",
    "stop": "h = model.layer1.output.save()\ntracer.stop()",
    "cache": "cache = tracer.cache(modules=[model.layer1])",
    "cache-steps": """
cache = tracer.cache()
out = model.output.save()
steps = save([len(cache["model.layer1"]), len(cache.model.layer2)])
first = save(cache.model.layer1[0].output)
second = save([step.input for step in cache["model.layer2"]])
""",
    "steer": """
direction = torch.nn.functional.normalize(torch.arange(10.0), dim=0)
h = model.layer1.output
model.layer1.output = h + 4.0 * direction * h.norm(dim=-1, keepdim=True)
out = model.output.save()
""",
    "ablate": """
direction = torch.linspace(-1, 1, 10)
direction = direction / direction.norm()
h = model.layer1.output
h -= (h @ direction)[..., None] * direction
out = model.output.save()
""",
    "lens": """
probabilities = model.layer2(model.layer1.output.relu()).softmax(dim=-1)
values, indices = probabilities.topk(2)
best = save(indices)
top = values.save()
entropy = -(probabilities * probabilities.log()).sum().item()
entropy = save(entropy)
""",
    "children": "names = save([child.path for child in model])\nnum = save(len(model))",
    "get": """
out = model.get('layer1').output.save()
paths = save([model.get(path).path for path in ('model', 'model.layer2', 'layer2')])
""",
    "class": """
class Probe:
    scale = 2
    def __init__(self, width):
        self.weight = torch.arange(float(width))
        self._seen = 0
    def __call__(self, value):
        self._seen += 1
        return value @ self.weight * self.scale
    @property
    def seen(self): return self._seen
    @staticmethod
    def of(width): return Probe(width)
    @classmethod
    def twice(cls, width): return cls(2 * width)
    def __repr__(self): return f'Probe({self._seen})'
    def __len__(self): return len(self.weight)
    def __getitem__(self, at): return self.weight[at]
    def __eq__(self, other): return isinstance(other, Probe)
probe = Probe.of(10)
out = save(probe(model.layer1.output))
text = save([repr(probe), probe.seen, len(probe), Probe.twice(2)._seen, probe == Probe(1)])
item = probe[3].save()
""",
    "own-module": """
class Head(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, 3)
        self.linear.weight.data[:] = 0.5
        self.linear.bias.data[:] = 1
        self.register_buffer('offset', torch.ones(3))
    def forward(self, value):
        return torch.relu(self.linear(value)) + self.offset
head = Head(10)
out = save(head(model.layer1.output))
num = save(sum(parameter.numel() for parameter in head.parameters()))
""",
    "modules": f"import {', '.join(MODULES)}\nout = save(sorted(contextlib.suppress.__name__))",
    "random-numbers": """
import random, statistics, time
random.seed(3)
out = save([statistics.mean([1, 2]), time.time() > 0, 0 <= random.random() < 1])
""",
    "dataclass": """
from dataclasses import dataclass, field, asdict
@dataclass
class Result:
    name: str
    values: list = field(default_factory=list)
result = Result('a')
result.values.append(x.sum().item())
out = save(asdict(result))
text = save(repr(result))
""",
    "namedtuple-and-enum": """
from collections import namedtuple
from enum import Enum
Point = namedtuple('Point', 'row column')
class Kind(Enum):
    LOW = 1
    HIGH = 2
point = Point(1, column=2)
row, column = point
out = save([row, column, point.row, point._replace(row=5).row, Kind.HIGH.name, Kind(1).value, len(list(Kind))])
""",
    "numpy": """
import numpy as np
a = x.numpy()
out = save(np.concatenate([a, a * 2]).mean(axis=0))
more = save([float(np.linalg.norm(a)), a.shape, a[1:, :2].tolist(), np.arange(3).tolist(), int(np.argmax(a)), a.T.shape])
zeros = save(np.zeros((2, 3), dtype=np.float32))
""",
    "torch": """
import torch.nn.functional as F
from torch import nn
out = save([
    torch.cat([x, x]).shape, torch.stack([x, x]).sum(), F.softmax(x, dim=-1), torch.einsum('ij,kj->ik', x, x),
    torch.where(x > 3, x, 0), torch.topk(x, 2).values, x.max(dim=1).indices, torch.linalg.norm(x), x.view(-1)[:3],
    torch.full((2, 2), 7.0), torch.eye(3), torch.arange(0, 1, 0.25), x.repeat(2, 1), x.expand(2, 3, 4).shape,
    torch.cdist(x, x), F.cosine_similarity(x, x + 1), F.one_hot(torch.tensor([0, 2])), torch.bincount(torch.tensor([1, 1])),
    x.unsqueeze(0).transpose(1, 2).contiguous().flatten(), x.to(torch.float64).dtype, x.quantile(0.5), x.std(),
    torch.fft.rfft(x).abs(), F.pad(x, (1, 1)), torch.outer(x[0], x[1]), x.masked_fill(x > 2, 0), torch.equal(x, x),
    x.T @ x, -x, x ** 2, 2 ** x, x % 2, x // 2, x == x, (x > 1) & (x < 5), ~(x > 1), x.tolist(), x.unique().numel(),
    x.cumsum(0), x.sort(descending=True).values, x.gather(1, torch.zeros(3, 1, dtype=torch.long)), torch.tensor([[1, 2], [3, 4]]),
    torch.isnan(x).any().item(), x.index_select(0, torch.tensor([1])), x.scatter(0, torch.zeros(1, 4, dtype=torch.long), 1.0),
    x.new_zeros(2), torch.finfo(torch.float32).max, x.device, isinstance(x, torch.Tensor), x.numel(), torch.tensor(3.0).item(),
    x.repeat_interleave(2, dim=0), torch.meshgrid(x[0], x[1], indexing='ij')[0], nn.Identity()(x), torch.linalg.svd(x)[1].shape,
])
""",
    "einops": "import einops\nout = save([einops.rearrange(x, 'a b -> b a'), einops.repeat(x, 'a b -> a b c', c=2)])",
    "gradients": """
h = model.layer1.output
out = model.layer2.output.sum()
with out.backward():
    grad = h.grad.save()
""",
    "gradients-in-a-method": """
class Gradients:
    def of(self, hidden, loss):
        with loss.backward():
            found = hidden.grad.save()
            counted = [i for i in range(3)].save()
        return found, counted
h = model.layer1.output
out = save(Gradients().of(h, model.layer2.output.sum()))
""",
    "autograd": "w = torch.ones(4, requires_grad=True)\nout = save(torch.autograd.grad((x @ w).sum(), w)[0])",
    "print": "print('hidden', model.layer1.output.shape, sep=': ')\nout = save(1)",
    "token-ids": """
prompt = torch.tensor([50256, 1212, 318, 257])
batch = torch.tensor([[464, 3290, 30], [464, 2068, 7586]])
labels = torch.as_tensor([100, 200, 300, 400, 500])
out = save([prompt, batch, labels, x.new_tensor([10, 20, 30, 40, 50, 60, 70]), torch.tensor([torch.tensor(1.5), 2.0])])
import numpy as np
more = save([np.array([50256, 1212, 318]), np.asarray([[1.5, 2], [3, 4]]), np.array([np.arange(3), np.arange(3)])])
picked = save([x[[2, 0]], x[torch.tensor([0, 1]), [1, 2]], np.arange(9)[[1, 2]], torch.tensor(range(3))])
""",
    "probe-trained": """
torch.manual_seed(1)
probe = torch.nn.Linear(4, 2)
losses = []
for step in range(5):
    loss = torch.nn.functional.cross_entropy(probe(x), torch.tensor([0, 1, 0]))
    weight, bias = torch.autograd.grad(loss, [probe.weight, probe.bias])
    with torch.no_grad():
        probe.weight.data -= 0.1 * weight
        probe.bias.sub_(0.1 * bias)
    losses.append(loss.item())
out = save(losses)
class Probe(torch.nn.Linear):
    def __init__(self, width, *, scale=2.0):
        super().__init__(width, 3, bias=False)
        self.scale = scale
    def forward(self, value): return super().forward(value) * self.scale
class Same(torch.nn.Linear): pass
net = torch.nn.Sequential(Probe(4), torch.nn.ReLU(), Same(3, 2))
last = save([net(x), len(net), torch.nn.Embedding(9, 3)(torch.tensor([1, 8])).shape])
""",
    "numpy-more": """
import numpy as np
a = np.array([[1.0, 0.0], [3.0, 4.0]])
out = save([np.divide(1.0, a, out=np.zeros_like(a), where=a != 0), a + [1, 2], a * 2, a @ a, a > [1, 0], a[:, [1, 0]], a[a > 1],
    a.astype(int), a.astype('float32'), a.astype(np.float32).dtype == np.float32, np.zeros(2, dtype=int), np.einsum('ij,jk->ik', a, a),
    np.concatenate([a, [[5, 6]]]), np.linalg.norm(a, 'fro'), np.sort(a, axis=0, kind='stable'), np.int64(3) + 1, np.float32(0.5) * a,
    np.repeat(a, 2, axis=0), np.full((2, 2), 7), np.dtype('float32').itemsize, np.quantile(a, 0.5, method='linear'), 3 in np.array([1, 3])])
a[0] = [9, 8]
a[0], a[1] = a[1].copy(), a[0].copy()
last = save(a)
torch.manual_seed(0)
b = torch.tensor(a)
b[0], b[1] = b[1].clone(), b[0].clone()
tensors = save(b)
""",
    "text-and-bytes": "out = save(['é'.encode(), 'a'.encode('utf-8'), b'ab'.decode(), b'ab'.decode('ascii', errors='replace'), str(b'a', 'utf-8'), bytes('a', 'latin-1'), 'a'.encode('UTF-16-LE')])",
}


def saved_by(name: str, policy: Policy) -> str:
    """Return what a block saves, as text that can be compared."""
    message = message_of(BLOCKS[name].strip("\n"), x=torch.arange(12.0).reshape(3, 4))
    torch.manual_seed(0)
    saved = run(message, NNsight(Small()), policy, torch.ones(1, 5))["saved"]
    assert saved, "a block that saves nothing shows nothing"
    return repr(_plain(saved))


def _plain(value: Any) -> Any:
    """Return a value as what a client would get of it."""
    if isinstance(value, torch.Tensor):
        return ("tensor", value.dtype, value.shape, value.detach().tolist())
    if isinstance(value, list | tuple):
        return (type(value).__name__, [_plain(one) for one in value])
    if isinstance(value, dict):
        return (type(value).__name__, {key: _plain(one) for key, one in value.items()})
    return value if isinstance(value, int | float | str | None) else repr(value)
