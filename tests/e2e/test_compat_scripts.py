"""What the reference's page on vLLM shows, unchanged under ``python -m nnsight_engine.compat``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.families.checkpoints import write_checkpoint

pytestmark = [pytest.mark.e2e, pytest.mark.heavy]

SCRIPT = """
import torch
from nnsight.modeling.vllm import VLLM
from safetensors.torch import save_file

if __name__ == "__main__":
    model = VLLM("gpt2", tensor_parallel_size=1, gpu_memory_utilization=0.1, dispatch=True)

    with model.trace("The Eiffel Tower is in", temperature=0.0, top_p=1):
        logits = model.logits.output.save()
    next_token = model.tokenizer.decode(logits.argmax(dim=-1))
    found = {"plain": logits}
    print("next token:", repr(next_token))

    with model.trace("Hello", max_tokens=5) as tracer:
        logits = list().save()
        for step in tracer.iter[:]:
            logits.append(model.logits.output)
    found["steps"] = torch.cat(logits)

    with model.trace("The Eiffel Tower is in", temperature=0.0, top_p=1):
        # Modify hidden states
        model.transformer.h[-2].mlp.output = torch.zeros_like(
            model.transformer.h[-2].mlp.output
        )
        logits = model.logits.output.save()
    found["ablated"] = logits

    with model.trace(max_tokens=3) as tracer:
        with tracer.invoke("Hello", temperature=0.8, top_p=0.95):
            samples = list().save()
            for step in tracer.iter[:]:
                samples.append(model.samples.output.item())
    found["samples"] = torch.tensor(samples)
    save_file(found, "found.safetensors")
"""


def test_the_examples_for_vllm_run_unchanged(tmp_path: Path) -> None:
    folder = write_checkpoint("gpt2", tmp_path / "gpt2")
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "nnsight_engine.compat", "script.py"]
    ran = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    found = load_file(tmp_path / "found.safetensors")

    # vLLM serves weights of float32 in bfloat16.
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("The Eiffel Tower is in", return_tensors="pt").input_ids

    def last_logits() -> torch.Tensor:
        logits: torch.Tensor = model(ids).logits[0, -1].bfloat16()
        return logits

    with torch.no_grad():
        plain = last_logits()
        zeroed = model.transformer.h[-2].mlp.register_forward_hook(lambda *_: torch.zeros(1, 1, 1))
        ablated = last_logits()
        zeroed.remove()
    assert f"next token: {tokenizer.decode(found['plain'].argmax())!r}" in ran.stdout
    for name, expected in (("plain", plain), ("ablated", ablated)):
        torch.testing.assert_close(found[name].flatten(), expected, atol=0.1, rtol=0.05)
    assert (plain - ablated).abs().max() > 0.5
    assert found["steps"].shape == (5, len(tokenizer))
    assert found["samples"].shape == (3,)
    assert bool(((found["samples"] >= 0) & (found["samples"] < len(tokenizer))).all())
