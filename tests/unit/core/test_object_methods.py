"""A mounted method is on every value, disturbs nobody else, and goes away without a trace."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pydantic
import pytest
import torch

from nnsight_engine.core.object_methods import MountError, mount, unmount

NAME = "keep_me"
seen: list[object] = []


def keep(value: object) -> object:
    seen.append(value)
    return value


@pytest.fixture
def mounted() -> Iterator[None]:
    seen.clear()
    mount(NAME, keep)
    yield
    unmount(NAME)


class WithSlots:
    __slots__ = ()


class OwnMethod:
    def keep_me(self) -> str:
        return "own"


PLAIN = [3, True, None, 1.5, "text", b"", [1], (), {}, {1}, range(2), ..., len, lambda: 0, object()]
VALUES: list[Any] = [*PLAIN, WithSlots(), sys, ValueError("x"), torch.ones(2), torch.nn.Linear(1, 1)]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
@pytest.mark.usefixtures("mounted")
def test_every_value_has_the_method(value: Any) -> None:
    assert value.keep_me() is value
    assert seen == [value] or seen[0] is value


@pytest.mark.usefixtures("mounted")
def test_a_class_keeps_its_own_method_and_an_instance_its_own_attribute() -> None:
    layer: Any = torch.nn.Linear(1, 1)
    layer.keep_me = 5
    assert OwnMethod().keep_me() == "own"
    assert layer.keep_me == 5
    assert seen == []


def test_code_that_ran_before_the_mount_and_after_the_unmount_notices() -> None:
    def has(value: object) -> bool:
        return hasattr(value, NAME)

    for _ in range(100):  # often enough for the interpreter to specialise the look-up
        assert not has(3)
    mount(NAME, keep)
    for _ in range(100):
        assert has(3)
    unmount(NAME)
    assert not has(3)
    with pytest.raises(AttributeError, match="'int' object has no attribute 'keep_me'"):
        _ = (3).keep_me  # type: ignore[attr-defined]


def test_mounting_again_is_nothing_and_another_function_takes_over() -> None:
    mount(NAME, keep)
    before = vars(object)[NAME]
    mount(NAME, keep)
    assert vars(object)[NAME] is before
    mount(NAME, lambda value: "other")
    assert (3).keep_me() == "other"  # type: ignore[attr-defined]
    unmount(NAME)
    unmount(NAME)
    assert NAME not in dir(object)


class Proxy:
    def __getattr__(self, name: str) -> str:
        return f"remote {name}"


def test_while_the_condition_is_false_the_method_is_not_there() -> None:
    active = False
    mount(NAME, keep, when=lambda: active)
    try:
        proxy: Any = Proxy()
        assert proxy.keep_me == "remote keep_me"
        mocked = mock.Mock()
        mocked.keep_me()
        mocked.keep_me.assert_called_once_with()
        assert not hasattr(3, NAME)
        active = True
        assert proxy.keep_me() is proxy
        value: Any = None
        assert value.keep_me() is None
    finally:
        unmount(NAME)


@pytest.mark.usefixtures("mounted")
def test_dir_lists_it_only_where_it_is_an_attribute_of_its_own() -> None:
    layer: Any = torch.nn.Linear(1, 1)
    values: list[Any] = [3, None, int, torch.Tensor, torch.return_types.max, torch.ones(1), layer, sys]
    assert not any(NAME in dir(value) for value in values)
    layer.keep_me = 5
    assert all(NAME in dir(value) for value in (layer, OwnMethod(), OwnMethod))
    assert "real" in dir(3)


def test_dir_itself_is_put_back() -> None:
    before = vars(object)["__dir__"], vars(type)["__dir__"]
    mount(NAME, keep)
    mount(f"{NAME}_too", keep)
    unmount(NAME)
    assert f"{NAME}_too" not in dir(3)
    unmount(f"{NAME}_too")
    assert (vars(object)["__dir__"], vars(type)["__dir__"]) == before


@pytest.mark.usefixtures("mounted")
def test_fields_of_that_name_get_no_default() -> None:
    @dataclasses.dataclass
    class Fields:
        keep_me: bool
        other: int

    class Model(pydantic.BaseModel):
        keep_me: bool

    assert not hasattr(int, NAME)
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        Fields(other=1)  # type: ignore[call-arg]
    with pytest.raises(pydantic.ValidationError, match="Field required"):
        Model()  # type: ignore[call-arg]
    assert Fields(keep_me=True, other=1).keep_me is True


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.usefixtures("mounted")
def test_a_module_still_scripts() -> None:
    scripted = torch.jit.script(torch.nn.Linear(2, 2))
    assert scripted(torch.ones(1, 2)).shape == (1, 2)


@pytest.mark.parametrize("name", ["__eq__", "__class__"])
def test_what_object_has_is_never_replaced(name: str) -> None:
    with pytest.raises(MountError, match=f"object already has '{name}'"):
        mount(name, keep)
    unmount(name)
    assert name in dir(object)


def test_a_name_must_be_an_identifier() -> None:
    with pytest.raises(MountError, match="identifier as its name, got 'no name'"):
        mount("no name", keep)


def test_libraries_import_after_a_mount_and_it_works_until_the_interpreter_is_gone() -> None:
    program = (
        "import atexit, copy\nfrom nnsight_engine.core.object_methods import mount\n"
        "mount('save', copy.copy)\n"
        "import anyio, torch\n"
        "class Late:\n    def __del__(self): print('late', (3).save())\n"
        "late = Late(); atexit.register(lambda: print('atexit', None.save()))\n"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert sorted(answer.stdout.split("\n")) == ["", "atexit None", "late 3"]
    assert answer.stderr == ""


@pytest.mark.parametrize("python", [sys.executable, "python3.12", "python3.13"])
def test_the_packages_that_are_installed_can_be_listed_after_a_mount(python: str) -> None:
    # The module needs no other package, so it also runs in a Python without ours.
    program = (
        "import copy, importlib.metadata, sys\n"
        "sys.path.append('.')\n"
        "from nnsight_engine.core.object_methods import mount\n"
        "mount('save', copy.copy)\n"
        "importlib.metadata.entry_points(group='console_scripts')\n"
        "print(list(importlib.metadata.distributions())[:0].save())\n"
    )
    if (
        not shutil.which(python)
        or subprocess.run([python, "-V"], capture_output=True, check=False).returncode
    ):
        pytest.skip(f"{python} is not installed")
    answer = subprocess.run([python, "-I", "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout == "[]\n"
