"""Two ranks of FSDP2 train as one process does."""

import json
import math
import os
import subprocess
import sys
from datetime import timedelta

import numpy as np
import pytest
import torch.distributed as dist
from support import ranks_program
from support.jails import free_port
from support.learners import sample_of

from gspo_env.distributed import controller
from gspo_env.distributed.controller import serve
from gspo_env.distributed.messages import pack_shares, split_over_ranks, unpack_shares
from gspo_env.distributed.ranks import OneRankFailed, join
from gspo_env.errors import TrainingError


def test_a_rank_and_its_servers_can_form_groups_of_their_own(monkeypatch):
    """vLLM does, in a server and for sending weights; torchrun's agent hosts its own store only."""
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    launched = {
        **{"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(agent.port)},
        **{"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "1"},
    }
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    with join():
        where = f"tcp://127.0.0.1:{free_port()}"
        patience = timedelta(seconds=5)
        store, *_ = next(dist.rendezvous(where, rank=0, world_size=1, timeout=patience))
        store.set("key", "value")
        assert store.get("key") == b"value"
        assert launched.keys() & os.environ.keys() == {"TORCHELASTIC_RESTART_COUNT"}


def start(arguments, rank, port, size=2):
    launched = {
        **dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(size)),
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"},
    }
    return subprocess.Popen([sys.executable, *arguments], env={**os.environ, **launched})


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What two ranks found in all cases; they start once, since their imports take seconds."""
    out = tmp_path_factory.mktemp("ranks") / "out.json"
    port = free_port()
    processes = [start([ranks_program.__file__, out], rank, port) for rank in range(2)]
    try:
        assert [process.wait(240) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return json.loads(out.read_text())


@pytest.mark.ranks
@pytest.mark.parametrize("name", ranks_program.CASES)
def test_two_ranks_have_the_weights_and_metrics_of_one_process(results, name):
    found = results[name]
    assert "error" not in found, found
    assert found["difference"] < (1e-6 if name == "mixture of experts" else 1e-9)
    assert found["moved"] > 1e-4
    differ = ("time/update", "train/tokens_per_second", "train/shared_fraction")
    for metrics in (value for key, value in found.items() if key.startswith("metrics")):
        one, two = (
            {k: v for k, v in metrics[side].items() if k not in differ} for side in ("one", "two")
        )
        assert two == pytest.approx(one, rel=1e-5, abs=1e-7)


@pytest.mark.ranks
def test_the_values_of_kept_tokens_come_from_all_ranks(results):
    found = results["episodes of several sequences over several rows"]["tokens 1"]
    assert {key.split(",")[0] for key in found["one"]} == {"(0", "(1", "(2", "(3"}
    assert found["one"].keys() == found["two"].keys()
    for key, rows in found["one"].items():
        for one, two in zip(rows, found["two"][key], strict=True):
            assert sorted(two) == pytest.approx(sorted(one), abs=1e-9)


@pytest.mark.ranks
def test_all_ranks_skip_a_step_that_is_not_finite_on_one_of_them(results):
    found = results["a step without a finite gradient"]
    assert found["metrics 0"]["two"]["train/skipped_steps"] == 1
    assert found["metrics 1"]["two"]["train/skipped_steps"] == 0
    assert math.isfinite(found["moved"])


def sample(rng, episode, known=True):
    length = int(rng.integers(2, 30))
    fields = {"episode": episode} if known else {"episode": episode, "engine_logprobs": None}
    return sample_of(rng, rng.integers(0, 50, length), np.r_[-1, np.zeros(length - 1)], **fields)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [1, 2, 13])
def test_each_episode_goes_to_one_rank_whole(ranks, count):
    rng = np.random.default_rng(count)
    samples = [sample(rng, n // 2) for n in range(2 * count)]
    shares = split_over_ranks(samples, ranks)
    assert len(shares) == ranks
    owners = [{s.episode for s in share.samples} for share in shares]
    assert sorted(n for owned in owners for n in owned) == list(range(count))
    assert sum(len(share.samples) for share in shares) == len(samples)
    assert {(s.episodes, s.sequences) for s in shares} == {(count, 2 * count)}
    sizes = [sum(len(s.token_ids) for s in share.samples) for share in shares]
    most = max(sum(len(s.token_ids) for s in samples if s.episode == n) for n in range(count))
    assert max(sizes) <= sum(sizes) / ranks + most


def test_shares_arrive_as_they_were_sent():
    rng = np.random.default_rng(0)
    samples = [sample(rng, None, known=n % 3 > 0) for n in range(7)]
    sent = [
        split_over_ranks(samples[:1], 2)[0],
        split_over_ranks(samples[:1], 2)[1],
        split_over_ranks(samples, 2)[0],
    ]
    received = unpack_shares(*pack_shares(sent))
    for before, after in zip(sent, received, strict=True):
        assert (before.episodes, before.tokens) == (after.episodes, after.tokens)
        assert len(before.samples) == len(after.samples)
        for a, b in zip(before.samples, after.samples, strict=True):
            for name in ("token_ids", "turn_ids", "advantages"):
                np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
            assert (a.engine_logprobs is None) == (b.engine_logprobs is None)


class RankWithCommands:
    """A rank that gets a list of commands from rank 0."""

    rank = 1

    def __init__(self, *commands):
        self.commands = [{"command": command} for command in commands]

    def next_command(self):
        return self.commands.pop(0)


def test_an_error_of_one_rank_alone_is_the_reason_that_it_gives(monkeypatch):
    def fail(*_):
        raise TrainingError("the disk is lost")

    monkeypatch.setattr(controller, "_follow", fail)
    with pytest.raises(OneRankFailed, match=r"'update' after .* rank 1 alone: the disk is lost"):
        serve(RankWithCommands("learner", "update"), None)
    serve(RankWithCommands("learner", "learner", "end"), None)  # rank 0 had the error too
