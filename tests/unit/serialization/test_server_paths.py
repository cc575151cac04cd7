"""What clients are told of errors names no folder in which the server's Python and packages are installed."""

from __future__ import annotations

import ast
import builtins
import json
import os
import site
import sys
import sysconfig
from typing import Any

import pytest
import torch

import nnsight_engine
from nnsight_engine.sandbox.block_checker import CHECKED
from nnsight_engine.serialization import TRUSTED, Policy, encode_error
from nnsight_engine.serialization.failures import without_server_paths
from tests.security.host import Small, message_of, run

FOLDERS = {
    sys.prefix,
    sys.base_prefix,
    os.path.dirname(torch.__file__),
    os.path.dirname(os.__file__),
    os.path.dirname(nnsight_engine.__file__),
    *site.getsitepackages(),
    *sysconfig.get_paths().values(),
}
ENDING = [
    name
    for name, kind in vars(builtins).items()
    if isinstance(kind, type) and {BaseException, Exception} & {kind, *kind.__bases__}
]
CODES = [
    *(f"raise {name}" for name in ENDING),
    *(f"raise {name}(torch)" for name in ENDING),
    *(f"try:\n    int(torch)\nexcept TypeError as one:\n    raise {name}(torch) from one" for name in ENDING),
    *(f"def g():\n    yield 1\n    raise {name}\nlist(g())" for name in ENDING),
    *(f"try:\n    1 / 0\nfinally:\n    raise {name}(2)" for name in ENDING),
    "import sys\nsys.exit(3)",
    "from torch import nothing",
    "torch.einsum('ij,jk', torch.ones(2, 3))",
    "torch.nn.functional.softmax('a')",
    "torch.nothing",
    "error = ValueError('x')\nerror.add_note(str(torch))\nraise error",
    "error = ValueError('x')\nerror.where = str(torch)\nraise error",
]  # fmt: skip


@pytest.mark.parametrize("policy", [CHECKED, TRUSTED], ids=["checked", "trusted"])
def test_no_error_of_a_block_reveals_pythons_path(policy: Policy) -> None:
    for code in CODES:
        told = json.dumps(encode_error(_raised(code, policy)))
        assert [folder for folder in FOLDERS if f"{folder}/" in told] == [], code


def _raised(code: str, policy: Policy) -> BaseException:
    model: Any = nnsight_engine.NNsight(Small())
    try:
        run(message_of(code), model, policy, torch.ones(1, 5))
    except BaseException as error:  # noqa: BLE001 - whatever it is
        return error
    return ValueError("nothing was raised")


def test_files_are_named_from_their_package_on() -> None:
    assert without_server_paths(f"in {torch.__file__}, line 3") == "in torch/__init__.py, line 3"
    assert without_server_paths(ast.__file__) == "ast.py"
    assert without_server_paths(nnsight_engine.__file__) == "nnsight_engine/__init__.py"
    assert without_server_paths(__file__) == __file__, "nobody's but the one's whose code it is"
    assert without_server_paths("/home/somebody/script.py") == "/home/somebody/script.py"
