"""vLLM servers that die, hang, abort or lie; with a pretend server, so vLLM need not be installed.

`tests/engines/test_vllm.py` has the same with real servers.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import zlib
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import httpx2 as httpx
import pytest

from gspo_env.engines.base import Sampling
from gspo_env.engines.vllm import adapter, process, server
from gspo_env.engines.vllm.process import State
from gspo_env.engines.vllm.requests import ServerClient
from gspo_env.engines.vllm.server import VLLMServer, VLLMServerEngine
from gspo_env.errors import ConfigError, EngineError
from gspo_env.model.adapters import add_adapter
from gspo_env.model.export import named_weights

PRETEND = [sys.executable, "-S", str(Path(__file__).parents[1] / "support" / "pretend_vllm.py")]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="kills by /proc")


@pytest.fixture
def start(model, monkeypatch):
    """Starts a fleet of pretend servers."""
    monkeypatch.setattr(process, "_command", lambda folder: PRETEND)
    engines = []

    def begin(policy=model, max_context=100, **settings):
        engines.append(VLLMServerEngine(policy, VLLMServer(**settings), max_context=max_context))
        return engines[-1]

    yield begin
    for engine in engines:
        engine.close()


@pytest.fixture
def foreign(tmp_path):
    """A client of a server that somebody else started, which has an adapter of theirs."""
    settings, port = tmp_path / "settings.yaml", process.free_port("127.0.0.1")
    settings.write_text('{"enable-lora": true}')
    options = ["--uds", str(tmp_path / "s"), "--config", str(settings), "--port", str(port)]
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "adapter_model.safetensors").write_bytes(b"theirs")
    with subprocess.Popen([*PRETEND, *options]) as running:
        try:
            one = process.Server(address=f"http://127.0.0.1:{port}")
            process.wait([one], 60.0)
            with one.client(5.0) as client:
                load(client, "theirs", theirs)
                yield client
        finally:
            running.kill()


def load(client, name, folder):
    body = {"lora_name": name, "lora_path": str(folder)}
    client.post("/v1/load_lora_adapter", json=body).raise_for_status()


def adapters(client):
    """The names of the adapters that requests may have, and the numbers of those in memory."""
    (numbers,) = client.post(
        "/collective_rpc", json={"method": "adapter_ids", "kwargs": {}}
    ).json()["results"]
    return {each["id"] for each in client.get("/v1/models").json()["data"]}, numbers


@pytest.fixture(params=["whole", "adapter"])
def policy(request, model):
    """A model whose weights travel whole, or with an adapter that travels alone."""
    return add_adapter(model, 2) if request.param == "adapter" else model


def weights(engine, policy):
    return named_weights(policy, adapter=engine.adapter_only)


async def ask(engine, count):
    jobs = (engine.generate([3, 4], Sampling(max_tokens=1, seed=n)) for n in range(count))
    return [done.token_ids[0] for done in await asyncio.gather(*jobs)]


async def ask_long(engine, count, meanwhile):
    """Asks for long actions, and does something when all that each server has are under way."""
    jobs = [
        asyncio.create_task(engine.generate([3, 4], Sampling(max_tokens=90, seed=n)))
        for n in range(count)
    ]
    async with asyncio.timeout(120):
        await under_way(engine)
        await meanwhile
        return await asyncio.gather(*jobs)


async def under_way(engine):
    while True:
        await asyncio.sleep(0.01)
        counts = [len(server.requests) for server in engine._servers]
        if all(counts) and counts == [await asyncio.to_thread(held, s) for s in engine._servers]:
            return


def held(server):
    with server.client(5.0) as http:
        return http.get("/held").json()


def ids_of(*versions):
    """The ids of an action, from (id, tokens) of each version."""
    return tuple(token for token, tokens in versions for _ in range(tokens))


def change(model):
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.mul_(1.5).add_(0.1)


async def all_serve(engine, count):
    async with asyncio.timeout(120):
        while engine.copies < count:
            await asyncio.sleep(0.02)


def in_folder(engine):
    """The id that a server with the current weights answers with."""
    files = sorted(engine._folder.glob("*.safetensors"))
    if engine.adapter_only:
        files += sorted(engine._adapter.folder.glob("*.safetensors"))
    return zlib.crc32(b"".join(file.read_bytes() for file in files)) % 1000


def fault(engine, name, times=1):
    (engine._private.path / name).write_text("x" * times)


def test_a_killed_server_is_started_again_and_has_the_current_weights_at_its_first_request(
    start, policy
):
    engine = start(policy, replicas=2, adapter_only=hasattr(policy, "disable_adapter"))

    async def play():
        before = in_folder(engine)
        assert await ask(engine, 8) == [before] * 8
        change(policy)
        await engine.update_weights(weights(engine, policy), 1)
        after, pids = in_folder(engine), engine.pids
        assert after != before
        os.kill(pids[0], signal.SIGKILL)
        assert await ask(engine, 8) == [after] * 8  # on the other one
        await all_serve(engine, 2)
        assert len(set(pids) | set(engine.pids)) == 3
        assert await ask(engine, 8) == [after] * 8
        await engine.update_weights(weights(engine, policy), 2)
        return await engine.generate([3], Sampling(max_tokens=1))

    assert asyncio.run(play()).weights_version == 2
    assert engine.metrics() == {
        "rollout/servers": 2.0,
        "rollout/servers_lost": 1.0,
        "rollout/server_restarts": 1.0,
    }


@pytest.mark.slow
def test_a_server_that_drops_a_request_and_is_slow_to_say_that_it_is_healthy_is_kept(start):
    engine = start(replicas=1)
    for name in ("drops", "busy"):
        fault(engine, name)
    assert asyncio.run(ask(engine, 1)) == [in_folder(engine)]
    assert engine.servers_lost == 0


def test_weights_change_in_flight_on_every_server_and_each_token_has_its_version(start, model):
    engine = start(replicas=2)
    fault(engine, "slow")
    before = in_folder(engine)
    change(model)
    update = engine.update_in_flight(named_weights(model), 5)
    log = asyncio.run(ask_long(engine, 6, update))
    after = in_folder(engine)
    assert before != after
    for done in log:
        (old, first), (new, rest) = done.weights_versions
        assert (old, new, done.weights_version, first) == (0, 5, 0, 41)
        assert done.token_ids == ids_of((before, first), (after, rest))
    assert engine.weights_version == 5
    assert engine.servers_lost == 0


def test_a_server_killed_during_an_update_in_flight_loses_no_request_and_rejoins(start, policy):
    engine = start(policy, replicas=2, adapter_only=hasattr(policy, "disable_adapter"))
    fault(engine, "slow")
    before = in_folder(engine)

    async def kill_and_update():
        os.kill(engine.pids[0], signal.SIGKILL)
        change(policy)
        await engine.update_in_flight(weights(engine, policy), 1)

    async def play():
        log = await ask_long(engine, 6, kill_and_update())
        await all_serve(engine, 2)
        return log, await ask(engine, 6)

    log, later = asyncio.run(play())
    after = in_folder(engine)
    for done in log:
        runs = done.weights_versions or ((done.weights_version, 90),)
        assert done.token_ids == ids_of(*(((before, after)[v], tokens) for v, tokens in runs))
    assert later == [after] * 6
    assert engine.servers_lost == engine.server_restarts == 1


def test_requests_of_a_server_that_refuses_the_weights_go_to_the_other_at_once(start, model):
    engine = start(replicas=2)
    fault(engine, "slow")
    fault(engine, "refuses")
    change(model)
    log = asyncio.run(ask_long(engine, 6, engine.update_in_flight(named_weights(model), 1)))
    assert len(log) == 6
    assert engine.copies == engine.servers_lost == 1
    assert log[0].weights_versions or log[1].weights_versions
    assert {log[0].weights_version, log[1].weights_version} == {0, 1}


def test_a_server_that_refuses_the_weights_answers_others_and_has_no_version_of_the_run(
    start, model
):
    engine = start(replicas=2)
    fault(engine, "refuses")
    change(model)
    asyncio.run(engine.update_weights(named_weights(model), 1))
    assert engine.copies == 1
    (lost,) = [server for server in engine._servers if server.state is State.LOST]
    with lost.client(5.0) as client:
        body = {"token_ids": [3], "sampling_params": {"max_tokens": 1}}
        (choice,) = client.post("/inference/v1/generate", json=body).json()["choices"]
    assert choice["weight_versions"][0]["version"] == "unknown"


@pytest.mark.parametrize("adapter_only", [False, True])
def test_the_requests_of_others_go_on_when_a_server_refuses_the_weights(
    start, model, foreign, tmp_path, adapter_only
):
    policy = add_adapter(model, 2) if adapter_only else model
    address = str(foreign.base_url).rstrip("/")
    engine = start(policy, addresses=(address,), adapter_only=adapter_only)
    own = ServerClient(engine.server_list, 4)
    for name in ("slow", "refuses"):
        (tmp_path / name).write_text("x")

    async def play():
        async with httpx.AsyncClient(base_url=address, timeout=60.0) as others:
            body = {"token_ids": [3], "sampling_params": {"max_tokens": 90}}
            theirs = asyncio.create_task(others.post("/inference/v1/generate", json=body))
            ours = [
                asyncio.create_task(each.generate([3], Sampling(max_tokens=90)))
                for each in (engine, own)
            ]
            async with asyncio.timeout(60):
                while foreign.get("/held").json() < 3:
                    await asyncio.sleep(0.01)
                change(policy)
                with pytest.raises(EngineError, match="none of the 1 vLLM servers is left"):
                    await engine.update_in_flight(weights(engine, policy), 1)
                own.replace_servers(engine.server_list)
                failed = await asyncio.gather(*ours, return_exceptions=True)
                return failed, (await theirs).json()["choices"][0]

    failed, choice = asyncio.run(play())
    assert [type(each) for each in failed] == [EngineError] * 2
    assert (choice["finish_reason"], len(choice["token_ids"])) == ("length", 90)


def test_a_request_for_one_server_reaches_it_also_if_it_is_the_busiest(start, model):
    engine = start(replicas=2)
    fault(engine, "slow")

    async def probe():
        for copy in (0, 1):
            before = [len(server.requests) for server in engine._servers]
            jobs = [engine.generate_on(copy, [3], Sampling(max_tokens=90)) for _ in range(3)]
            asked = [asyncio.create_task(job) for job in jobs]
            async with asyncio.timeout(60):
                while sum(len(server.requests) for server in engine._servers) < sum(before) + 3:
                    await asyncio.sleep(0)
            added = [len(s.requests) - n for s, n in zip(engine._servers, before, strict=True)]
            assert added == [3 * (copy == 0), 3 * (copy == 1)]
            probes.extend(asked)
        change(model)
        await engine.update_in_flight(named_weights(model), 1)
        await asyncio.gather(*probes)

    probes = []
    asyncio.run(ask_long(engine, 6, probe()))


def test_a_request_for_a_server_that_is_lost_goes_to_another_one(start):
    engine = start(replicas=2)
    engine._lose(engine._servers[1], "test", restart=False)
    done = asyncio.run(engine.generate_on(1, [3], Sampling(max_tokens=1)))
    assert done.token_ids == (in_folder(engine),)


def test_a_server_that_somebody_started_again_without_the_adapter_is_not_used(start, model):
    engine = start(add_adapter(model, 2), replicas=2, adapter_only=True)
    client = ServerClient(engine.server_list, 4)
    with engine._servers[0].client(5.0) as http:
        name = {"lora_name": engine.adapter}
        http.post("/v1/unload_lora_adapter", json=name).raise_for_status()
    assert asyncio.run(ask(client, 4)) == [in_folder(engine)] * 4
    ((_, reason),) = client.take_failed().items()
    assert "does not have the adapter" in reason
    assert asyncio.run(ask(engine, 4)) == [in_folder(engine)] * 4
    assert engine.servers_lost == 1


def test_an_adapter_shares_a_server_with_those_of_others_and_is_freed_in_the_end(
    start, model, foreign
):
    policy = add_adapter(model, 2)
    for version in (1, 2):  # the second run finds no trace of the first one
        engine = start(policy, addresses=(str(foreign.base_url),), adapter_only=True)
        assert adapters(foreign)[0] == {"theirs", engine.adapter}
        before = asyncio.run(ask(engine, 2))
        assert before == [in_folder(engine)] * 2
        change(policy)
        asyncio.run(engine.update_weights(weights(engine, policy), version))
        assert asyncio.run(ask(engine, 2)) == [in_folder(engine)] * 2 != before
        body = {"token_ids": [3], "model": "theirs", "sampling_params": {"max_tokens": 1}}
        (choice,) = foreign.post("/inference/v1/generate", json=body).json()["choices"]
        base = b"".join(file.read_bytes() for file in engine._folder.glob("*.safetensors"))
        assert choice["token_ids"] == [zlib.crc32(base + b"theirs") % 1000]
        engine.close()
        assert adapters(foreign) == ({"theirs"}, [1])


def test_an_adapter_of_another_run_that_has_the_same_name_is_not_replaced(start, model, foreign):
    policy, theirs = add_adapter(model, 2), adapter.NAME
    with TemporaryDirectory() as folder:
        load(foreign, theirs, folder)
        with pytest.raises(
            EngineError, match=r"has an adapter 'gspo-env-adapter' of its own, from"
        ):
            start(policy, addresses=(str(foreign.base_url),), adapter_only=True)
    assert theirs in adapters(foreign)[0]


def test_an_adapter_that_a_killed_run_left_is_replaced(start, model, foreign):
    load(foreign, adapter.NAME, "/tmp/gspo-env-servers-gone/adapter")
    policy = add_adapter(model, 2)
    engine = start(policy, addresses=(str(foreign.base_url),), adapter_only=True)
    assert asyncio.run(ask(engine, 2)) == [in_folder(engine)] * 2


def most_at_once(server):
    with server.client(5.0) as http:
        return int(http.get("/metrics").text.split("most ")[1])


@pytest.mark.parametrize("mute", [False, True])
def test_requests_follow_the_caches_of_servers_also_when_one_dies(start, mute):
    settings = {"follow_cache": True, "engine_args": {"num_gpu_blocks_override": 3}}
    engine = start(replicas=2, max_server_restarts=0, **settings)
    fault(engine, "slow")
    if mute:
        fault(engine, "mute", 1000)

    async def kill():
        os.kill(engine.pids[0], signal.SIGKILL)
        (engine._private.path / "slow").unlink()

    async def play():
        done = await ask_long(engine, 12, kill())
        assert {each.token_ids for each in done} == {(in_folder(engine),) * 90}
        assert await ask(engine, 4) == [in_folder(engine)] * 4

    asyncio.run(play())
    assert engine.servers_lost == 1
    assert engine.metrics()["rollout/preemptions"] == 0.0
    (left,) = (server for server in engine._servers if server.state is State.SERVING)
    assert mute or most_at_once(left) == 1


def test_processes_that_sample_on_the_same_servers_share_their_caches(start):
    settings = {"follow_cache": True, "engine_args": {"num_gpu_blocks_override": 65}}
    engine = start(replicas=1, **settings)
    client = ServerClient(engine.server_list, 64)  # of 256 requests at once
    assert client._cache_limit._share == 0.25
    fault(engine, "slow")

    async def go_on():
        (engine._private.path / "slow").unlink()

    done = asyncio.run(ask_long(client, 20, go_on()))
    assert {each.token_ids for each in done} == {(in_folder(engine),) * 90}
    assert 1 <= most_at_once(engine._servers[0]) <= 5


def test_servers_that_take_no_adapter_get_whole_weights_and_the_log_says_why(start, model, caplog):
    policy = add_adapter(model, 2)
    engine = start(policy, replicas=2, adapter_only=True, engine_args={"enable_lora": False})
    assert caplog.text.count("whole weights are sent: it answered 404") == 1
    assert not engine.adapter_only
    change(policy)
    asyncio.run(engine.update_weights(weights(engine, policy), 1))
    assert asyncio.run(ask(engine, 4)) == [in_folder(engine)] * 4
    assert engine.servers_lost == 0


@pytest.mark.parametrize("version", ["default", "0", "another-run.0"])
def test_a_server_that_got_other_weights_behind_our_back_is_not_used(start, version):
    """Somebody started it again, or sent weights of another run that have the same number."""
    engine = start(replicas=2)
    with engine._servers[0].client(5.0) as client:
        client.post("/update_weight_version", json={"new_version": version}).raise_for_status()
    assert asyncio.run(ask(engine, 4)) == [in_folder(engine)] * 4
    assert engine.servers_lost == 1


def test_servers_that_want_a_key_get_that_of_the_environment(start, model, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    engine = start(add_adapter(model, 2), replicas=2, adapter_only=True)
    assert engine.adapter_only
    assert asyncio.run(ask(engine, 4)) == [in_folder(engine)] * 4


@pytest.mark.parametrize(
    ("addresses", "expected"),
    [
        (("node:8000", "http://node:8001"), "expected http://HOST:PORT for each"),
        (("http://node:8000", "http://node:8001", "http://node:8000/"), "expected each .* once"),
    ],
)
def test_addresses_that_are_none_or_come_twice_are_refused(addresses, expected):
    with pytest.raises(ConfigError, match=expected):
        VLLMServer(addresses=addresses)


def test_a_server_samples_for_others_after_an_update_that_its_trainer_stopped(
    start, model, foreign, tmp_path
):
    engine = start(addresses=(str(foreign.base_url).rstrip("/"),))
    gate = tmp_path / "loading"
    gate.touch()

    async def stop():
        update = asyncio.create_task(engine.update_in_flight(named_weights(model), 1))
        async with asyncio.timeout(60):
            while not foreign.get("/is_paused").json()["is_paused"]:
                await asyncio.sleep(0.01)
        update.cancel()
        with suppress(asyncio.CancelledError):
            await update
        gate.unlink()

    asyncio.run(stop())  # as at Ctrl-C, it waits for its threads
    engine.close()
    assert not foreign.get("/is_paused").json()["is_paused"]


TRAINER = """
import sys
from gspo_env.engines.vllm.server import VLLMServer
from gspo_env.recipes.build import build_model
from gspo_env.recipes.tiny import Tiny
model = build_model(Tiny(hidden_size=32), 64, 1, 0)
VLLMServer(addresses=tuple(sys.argv[1:])).start(model, max_slots=2, max_context=100)
"""


def test_a_server_samples_for_others_after_its_trainer_was_killed_in_an_update(foreign, tmp_path):
    gate = tmp_path / "loading"
    gate.touch()

    async def paused(value):
        async with asyncio.timeout(120):
            while foreign.get("/is_paused").json()["is_paused"] is not value:
                await asyncio.sleep(0.01)

    with subprocess.Popen([sys.executable, "-c", TRAINER, str(foreign.base_url)]) as trainer:
        asyncio.run(paused(True))
        trainer.kill()
    gate.unlink()
    asyncio.run(paused(False))
    body = {"token_ids": [3], "model": "theirs", "sampling_params": {"max_tokens": 1}}
    (choice,) = foreign.post("/inference/v1/generate", json=body).json()["choices"]
    assert choice["weight_versions"][0]["version"] == "unknown"


def test_a_server_whose_python_has_no_pip_is_refused_with_what_it_needs(start, foreign, tmp_path):
    (tmp_path / "no pip").write_text("1")
    with pytest.raises(EngineError, match=r"failed with 500, as it does .* no pip"):
        start(addresses=(str(foreign.base_url).rstrip("/"),))
    assert not foreign.get("/is_paused").json()["is_paused"]


def test_a_server_that_takes_shorter_sequences_than_the_run_is_refused_and_not_paused(
    start, foreign
):
    address = str(foreign.base_url).rstrip("/")
    with pytest.raises(EngineError, match=r"maximum length is 100 tokens; .* 101"):
        start(max_context=101, addresses=(address,))
    body = {"token_ids": [3], "model": "theirs", "sampling_params": {"max_tokens": 1}}
    (choice,) = foreign.post("/inference/v1/generate", json=body).json()["choices"]
    assert choice["weight_versions"][0]["version"] == "default"


@pytest.mark.parametrize("updates", [False, True])
def test_requests_and_updates_wait_for_the_only_server_to_be_started_again(start, model, updates):
    engine = start()

    async def play():
        os.kill(engine.pids[0], signal.SIGKILL)
        if updates:
            await engine.update_weights(named_weights(model), 1)
        return await ask(engine, 4)

    assert asyncio.run(play()) == [in_folder(engine)] * 4


def test_weights_go_to_each_server_through_a_channel_of_its_own(start, model, monkeypatch):
    sent = []

    class Weights:
        def set(self, pairs):
            self.names = [name for name, _ in pairs]

    def open_channel(backend, server, workers, source):
        assert (backend, workers) == ("nccl", 1)
        return SimpleNamespace(
            send_weights=lambda: sent.append((server.name, source.names)), shutdown=lambda: None
        )

    vllm_transfer = SimpleNamespace(Weights=Weights, open_channel=open_channel)
    monkeypatch.setitem(sys.modules, "gspo_env.engines.vllm.transfer", vllm_transfer)
    engine = start(replicas=2, transfer="nccl", max_server_restarts=0)
    asyncio.run(engine.update_weights(named_weights(model), 1))
    assert len(sent) == 4
    assert len({name for name, _ in sent}) == 2
    assert all({name for name, _ in named_weights(model)} <= set(names) for _, names in sent)
    assert not list(engine._folder.glob("*.safetensors"))  # nothing goes through the disk
    fault(engine, "refuses")
    asyncio.run(engine.update_weights(named_weights(model), 2))
    assert (engine.copies, engine.servers_lost) == (1, 1)
    done = asyncio.run(engine.generate([3], Sampling(max_tokens=1)))
    assert done.weights_version == 2


async def restarted(engine, monkeypatch):
    """Kills the only server of an engine whose weights do not come from a folder."""
    monkeypatch.setattr(engine, "_transfer", "nccl")
    os.kill(engine.pids[0], signal.SIGKILL)
    asking = asyncio.create_task(ask(engine, 1))  # notices it
    async with asyncio.timeout(120):
        while engine._servers[0].state is not process.State.READY:
            await asyncio.sleep(0.02)
    return asking


def test_requests_from_elsewhere_do_not_wait_for_weights_that_nobody_sends(start, monkeypatch):
    engine = start()
    before = engine.server_list

    async def play():
        asking = await restarted(engine, monkeypatch)
        client = ServerClient(engine.server_list, 4)
        sentence = r"none of the 1 vLLM servers is left; .*waits for the next weights"
        with pytest.raises(EngineError, match=sentence):
            await asking
        with pytest.raises(EngineError, match=sentence):
            await asyncio.wait_for(ask(client, 1), 5.0)

    asyncio.run(play())
    assert before.lost == ""


def test_an_older_message_does_not_undo_what_a_newer_one_said(start, monkeypatch):
    engine = start(replicas=2)
    first = engine.server_list
    engine._lose(engine._servers[0], "test", restart=False)
    second = engine.server_list
    client = ServerClient(first, 4)
    client.replace_servers(second)
    client.replace_servers(first)  # it was sent earlier, and came later
    assert len(client._servers) == 1
    client.replace_servers(second)
    assert len(client._servers) == 1


def test_restarts_are_bounded_and_the_reason_is_told(start):
    engine = start(max_server_restarts=2)
    fault(engine, "dies", times=100)
    with pytest.raises(EngineError, match="none of the 1 vLLM servers is left; the last one was"):
        asyncio.run(ask(engine, 1))
    assert engine.metrics()["rollout/server_restarts"] == 2.0


@pytest.mark.parametrize("name", ["abort", "fails", "dies"])
def test_a_request_that_its_server_drops_is_played_on_the_other(start, name):
    engine = start(replicas=2)
    fault(engine, name)
    assert asyncio.run(ask(engine, 6)) == [in_folder(engine)] * 6
    assert engine.servers_lost == 1


def test_an_answer_that_cannot_be_read_is_an_error_with_the_answer(start):
    engine = start()
    fault(engine, "empty")
    with pytest.raises(EngineError, match=r"cannot be read: .*choices"):
        asyncio.run(ask(engine, 1))


def test_servers_listen_only_on_a_socket_that_nobody_else_can_reach(start):
    engine = start()
    (one,) = engine._servers
    assert Path(one.socket).parent.stat().st_mode & 0o777 == 0o700
    inodes = set()
    for link in Path(f"/proc/{engine.pids[0]}/fd").iterdir():
        inodes |= {os.readlink(link)}
    tcp = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
    listening = {f"socket:[{line.split()[9]}]" for line in tcp.splitlines()[1:] if " 0A " in line}
    assert not inodes & listening


def test_a_listener_that_was_not_started_here_is_refused(start, tmp_path):
    engine = start()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "s"))
        other.listen()
        with pytest.raises(EngineError, match=f"process {os.getpid()} listens on"):
            process._listener(str(tmp_path / "s"), engine._servers[0].guard.process.pid)


def test_a_closed_engine_leaves_neither_processes_nor_files(start):
    engine = start(replicas=2)
    pids, folder = engine.pids, engine._private.path
    engine.close()
    engine.close()
    assert not folder.exists()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_server_that_ends_while_it_starts_is_named_with_its_last_error(start, monkeypatch):
    code = "raise RuntimeError('no such device')"
    monkeypatch.setattr(process, "_command", lambda folder: [sys.executable, "-c", code])
    with pytest.raises(EngineError, match=r"exit code 1 while starting: RuntimeError: no such"):
        start()


def test_a_server_without_the_transfer_backend_is_named_with_its_reason(start, monkeypatch):
    class Forgetful(dict):
        """A server that was started by hand, without `--weight-transfer-config`."""

        def __setitem__(self, name, value):
            assert name == "weight_transfer_config"

    plain = server.engine_arguments
    transfer = SimpleNamespace(Weights=lambda: SimpleNamespace(set=list))
    monkeypatch.setitem(sys.modules, "gspo_env.engines.vllm.transfer", transfer)
    monkeypatch.setattr(server, "engine_arguments", lambda *given: Forgetful(plain(*given)))
    with pytest.raises(EngineError, match=r"none of the 1 vLLM .*backend is None; expected 'nccl'"):
        start(transfer="nccl")
