"""``nnsight-engine check`` on a real model, and the faults that a certificate finds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nnsight_engine.certificate.certificate import PLAIN, SKIP, VALUES, WRITES, Certificate, Status
from tests.e2e.certificate_mutants import MUTANTS
from tests.e2e.check_process import own_cache, report_of
from tests.families.checkpoints import write_checkpoint

pytestmark = [pytest.mark.e2e, pytest.mark.heavy]

_TIMEOUT_S = 560


def checked(model: Path | str, cache: Path, *options: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "VLLM_CACHE_ROOT": str(own_cache(cache)),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    return subprocess.run(
        [sys.executable, "-m", "app", "check", str(model), *options],
        capture_output=True,
        text=True,
        env={**environment, "OMP_NUM_THREADS": "1"},
        timeout=_TIMEOUT_S,
        check=False,
    )


def test_check_prints_every_comparison_writes_json_and_exits_with_0(tmp_path: Path) -> None:
    checkpoint, file = write_checkpoint("llama", tmp_path / "model"), tmp_path / "certificate.json"
    options = ["--layers", "0,-1", "--prompt", " I think dogs are good", "--json", str(file)]
    done = checked(checkpoint, tmp_path / "cache", *options, "--max-num-seqs", "4")
    assert done.returncode == 0, done.stderr
    certificate = Certificate.from_json(file.read_bytes())
    assert certificate.is_ok
    assert (certificate.architecture, certificate.layers) == ("LlamaForCausalLM", [0, 3])
    assert set(certificate.counts()) == {Status.OK}
    for what in (PLAIN, *VALUES, *WRITES, SKIP):
        assert certificate.counts(what)[Status.OK] >= 2, what
    rows = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines() if line}
    assert rows["layers.3.attn.q"] == ["ok"] * 5
    assert rows["layers.0.attn.pattern"] == ["ok"] * 2
    assert rows["layers.0"] == ["ok"]


def test_check_says_in_one_line_why_it_cannot_be_carried_out(tmp_path: Path) -> None:
    done = checked(tmp_path, tmp_path / "cache")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "has no config.json" in done.stderr.splitlines()[-1]


def test_linear_attention_is_ok_in_bfloat16(tmp_path: Path) -> None:
    # With these weights, rounding changes no choice of experts on this prompt.
    checkpoint = write_checkpoint("qwen3_next", tmp_path / "model", seed=36)
    file = tmp_path / "certificate.json"
    options = ["--dtype", "bfloat16", "--layers", "2,3", "--json", str(file), "--prompt", " I think dogs are"]
    done = checked(checkpoint, tmp_path / "cache", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {one.subject for one in Certificate.from_json(file.read_bytes()).findings}
    assert {
        "layers.2.mixer.output",
        "layers.3.attn.q",
        "layers.3.attn.pattern",
        "layers.3.moe.experts",
    } <= found


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[str, str, str]]]:
    found = report_of("tests.e2e.certificate_mutants", tmp_path_factory.mktemp("mutants"), list(MUTANTS))
    return {
        name: [(subject, what, status) for subject, what, status in faults] for name, faults in found.items()
    }


@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_put_in_on_purpose_is_found(name: str, faults: dict[str, list[tuple[str, str, str]]]) -> None:
    wrong = {
        (subject, what): status
        for subject, what, status in faults[name]
        if status in {Status.DIFFERS, Status.SILENTLY_WRONG}
    }
    assert set(MUTANTS[name].found) <= wrong.keys(), faults[name]
    assert bool(wrong) == bool(MUTANTS[name].found), faults[name]
    if name == "no_write":
        assert {what for _, what in wrong} == {"steer"}
        assert set(wrong.values()) == {Status.SILENTLY_WRONG}
