"""The number of CPU threads, and how they wait for each other."""

import os
import platform

import pytest
from support.jails import run_python

AGENT = """
import gspo_env, torch
from gspo_env import Config
from gspo_agents.gspo import GSPOAgent
from gspo_env.model.threads import use_threads
from transformers import Qwen3Config, Qwen3ForCausalLM
torch.set_num_threads(4)
shape = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "head_dim": 32}
big = Qwen3ForCausalLM(Qwen3Config(vocab_size=100_000, num_hidden_layers=1, **shape))
print(use_threads(big))
config = Config.from_recipe("tiny", recipe={"demonstrations": 20})
GSPOAgent(config=config)
print(torch.get_num_threads())
"""


def run(program, **variables):
    rest = {k: value for k, value in os.environ.items() if not k.startswith(("OMP_", "GOMP_"))}
    return run_python("-c", program, env=rest | variables, check=True).stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize(("own", "small"), [({}, "1"), ({"OMP_NUM_THREADS": "2"}, "4")])
def test_a_small_model_computes_with_one_thread_unless_the_user_chose(own, small):
    threads = run(AGENT, **own).split()
    assert threads in [[big, small] for big in ("124" if not own else "4")]  # big's are measured


@pytest.mark.parametrize(
    ("own", "waiting"),
    [
        ({}, "PASSIVE 3000"),
        ({"GOMP_SPINCOUNT": "7"}, "PASSIVE 7"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE None"),
    ],
)
def test_threads_spin_briefly_while_they_wait_unless_the_user_chose(own, waiting):
    values = "os.environ['OMP_WAIT_POLICY'], os.environ.get('GOMP_SPINCOUNT')"
    assert run(f"import gspo_env, os; print({values})", **own) == waiting


def test_a_worker_of_a_comparison_takes_no_more_threads_than_the_user_allows():
    program = """
import sys, torch
from gspo_env.compare.processes import set_up_worker
out = sys.stdout
set_up_worker(8)
print(torch.get_num_threads(), file=out)
"""
    assert run(program, OMP_NUM_THREADS="1") == "1"


KEEPS = """
import resource, torch
from gspo_env.model.threads import keep_memory
keep_memory()
def work():
    made = [torch.ones(1 << 20) for _ in range(8)]  # 4 MiB each
work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    work()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="an option of glibc")
def test_tensors_after_others_were_freed_need_no_new_pages_unless_the_user_set_the_allocator():
    pages = 10 * 8 * (1 << 22) // 4096
    assert int(run(KEEPS)) < pages // 10
    assert int(run(KEEPS, MALLOC_TRIM_THRESHOLD_="131072")) > pages // 10
