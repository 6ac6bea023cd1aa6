"""The program for a machine with a GPU: it says that there is none, and its own code runs."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from pretend_device import pretend_gpu

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def program(monkeypatch):
    """The module; what it measures of a real GPU is left out."""
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location("gpu_check", FOLDER / "gpu_check.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in ("synchronize", "reset_peak_memory_stats", "set_sync_debug_mode"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 0)
    monkeypatch.setattr(module, "report", lambda *_: True)  # speed is the GPU's
    return module


def test_without_a_gpu_it_says_so_and_fails(program, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["gpu_check.py"])
    with pytest.raises(SystemExit) as left:
        program.main()
    assert left.value.code == 2
    assert "no GPU" in capsys.readouterr().out


def test_an_unknown_check_is_refused(program, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["gpu_check.py", "attentoin"])
    with pytest.raises(SystemExit) as left:
        program.main()
    assert left.value.code == 2
    assert "attentoin" in capsys.readouterr().err


def test_its_comparison_of_attention_passes_on_a_pretend_gpu(program, capsys):
    with pretend_gpu() as gpu:
        assert program.attention(1, tasks=1, shared=64, heads=4)
    assert "torch_attn._varlen_attn.default" in gpu.kernels
    assert "_flash_attention_backward.default" in gpu.kernels
    assert capsys.readouterr().out.count("relative error") == 16


def test_a_wrong_kernel_fails(program, monkeypatch):
    real = program.varlen.attend_forks
    monkeypatch.setattr(
        program.varlen, "attend_forks", lambda q, k, v, s, f, c: real(q, k, v, s, [], c)
    )
    with pretend_gpu():
        assert not program.attention(1, tasks=1, shared=64, heads=4)


@pytest.mark.slow
def test_its_updates_and_decode_steps_run_on_a_pretend_gpu(program, monkeypatch):
    monkeypatch.setattr(program, "alternate", lambda rounds, *works: [[work()] for work in works])
    with pretend_gpu():
        assert program.update(1, size="small", own=(16, 32))
        assert program.waits(1, shared=16, tokens=4)


def test_an_exception_is_a_failure(program, monkeypatch, capsys):
    monkeypatch.setitem(program.CHECKS, "waits", lambda rounds: 1 / 0)
    assert not program.passes("waits", 1)
    assert "waits: FAILED" in capsys.readouterr().out


def test_two_gpus_are_asked_for_where_they_are_needed(program, capsys):
    with pretend_gpu():
        assert program.passes("nccl", 1)
    assert "not run: it needs two GPUs" in capsys.readouterr().out
