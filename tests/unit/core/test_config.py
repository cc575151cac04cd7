"""Options are checked when set, remembered in a private file, and never fail an import."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from nnsight_engine.core.config import Config


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "config.json"


def test_defaults_without_a_file(path: Path) -> None:
    config = Config(path)
    assert (config.APP.DEBUG, config.APP.CROSS_INVOKER, config.APP.PYMOUNT) == (False, True, True)
    assert config.APP.REMOTE_LOGGING is True
    assert (config.API.HOST, config.API.KEY) == ("http://127.0.0.1:8000", "")
    assert not path.parent.exists()


def test_nothing_is_remembered_until_saved(path: Path) -> None:
    config = Config(path)
    config.APP.DEBUG = True
    assert Config(path).APP.DEBUG is False
    config.save()
    assert Config(path).APP.DEBUG is True


def test_the_file_is_its_owners_alone(path: Path) -> None:
    Config(path).set_default_api_key("secret")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o644)
    Config(path).save()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["config.json"]


def test_a_default_is_remembered_without_the_rest(path: Path) -> None:
    config = Config(path)
    config.APP.CROSS_INVOKER = False
    config.set_default_api_key("secret")
    config.set_default_app_debug(True)
    later = Config(path)
    assert (later.API.KEY, later.APP.DEBUG, later.APP.CROSS_INVOKER) == ("secret", True, True)


def test_the_key_is_not_shown(path: Path) -> None:
    config = Config(path)
    config.API.KEY = "secret"
    assert "secret" not in repr(config)
    assert "HOST" in repr(config)


def test_an_unknown_option_is_an_error_that_lists_them(path: Path) -> None:
    config = Config(path)
    with pytest.raises(AttributeError, match="no option 'DEBUGG'; there are DEBUG, CROSS_INVOKER, PYMOUNT"):
        config.APP.DEBUGG = True
    with pytest.raises(AttributeError, match="no option 'PORT'; there are HOST, KEY"):
        config.API.PORT = 1
    with pytest.raises(AttributeError, match="'DEBUG' cannot be set here"):
        config.DEBUG = True


def test_a_value_of_the_wrong_type_is_an_error(path: Path) -> None:
    config = Config(path)
    with pytest.raises(TypeError, match="DEBUG must be a bool, got int"):
        config.APP.DEBUG = 1  # type: ignore[assignment]
    with pytest.raises(TypeError, match="KEY must be a str, got NoneType"):
        config.set_default_api_key(None)  # type: ignore[arg-type]
    assert not path.exists()


def test_trace_caching_is_deprecated_and_stays_on(path: Path) -> None:
    config = Config(path)
    with pytest.warns(DeprecationWarning, match="TRACE_CACHING is deprecated") as caught:
        config.APP.TRACE_CACHING = False
    assert caught[0].filename == __file__
    assert config.APP.TRACE_CACHING is True


def test_the_keys_former_name_is_deprecated(path: Path) -> None:
    config = Config(path)
    with pytest.warns(DeprecationWarning, match=r"now CONFIG\.API\.KEY") as caught:
        config.API.APIKEY = "secret"
    with pytest.warns(DeprecationWarning, match=r"now CONFIG\.API\.KEY") as read:
        found = config.API.APIKEY
    assert [caught[0].filename, read[0].filename] == [__file__] * 2
    assert found == config.API.KEY == "secret"
    assert "secret" not in repr(config)


@pytest.mark.parametrize("content", ["{not json", "[]", '"text"', "\xff\xfe", '{"APP": 3}'])
def test_a_broken_file_is_a_warning_that_names_it(path: Path, content: str) -> None:
    path.parent.mkdir()
    path.write_bytes(content.encode("latin-1"))
    with pytest.warns(UserWarning, match=f"{path}: ignored"):
        config = Config(path)
    assert config.APP.DEBUG is False


def test_a_file_that_cannot_be_read_is_a_warning(path: Path) -> None:
    path.mkdir(parents=True)
    with pytest.warns(UserWarning, match="cannot be read"):
        Config(path)


def test_unknown_and_wrong_entries_are_skipped_and_the_rest_is_used(path: Path) -> None:
    path.parent.mkdir()
    content = {"APP": {"DEBUG": True, "NEW": 1, "PYMOUNT": "no"}, "API": {"KEY": "k"}, "NEXT": {}}
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.warns(UserWarning, match="ignored") as caught:
        config = Config(path)
    messages = [str(warning.message) for warning in caught]
    assert len(messages) == 3
    assert any("unknown option APP.NEW" in message for message in messages)
    assert any("APP.PYMOUNT: PYMOUNT must be a bool, got str" in message for message in messages)
    assert (config.APP.DEBUG, config.APP.PYMOUNT, config.API.KEY) == (True, True, "k")


def test_what_a_newer_version_saved_survives(path: Path) -> None:
    path.parent.mkdir()
    path.write_text('{"APP": {"NEW": 1}, "NEXT": {"a": 2}}', encoding="utf-8")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Config(path).save()
    content = json.loads(path.read_text(encoding="utf-8"))
    assert content["APP"]["NEW"] == 1
    assert content["NEXT"] == {"a": 2}


def test_a_link_to_the_file_stays_a_link(path: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.json"
    link.symlink_to(path)
    Config(link).set_default_api_key("secret")
    assert link.is_symlink()
    assert Config(path).API.KEY == "secret"


def test_the_library_s_config_is_per_user(tmp_path: Path) -> None:
    program = "from nnsight_engine.core.config import CONFIG\nCONFIG.set_default_app_debug(True)"
    environment = {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path / "config")}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)
    assert [file.relative_to(tmp_path).as_posix() for file in tmp_path.rglob("config.json")] == [
        "config/nnsight-engine/config.json"
    ]
