"""Groups that others play: the same as in one process, each once, whoever dies.

The workers here are threads, so that Ray need not be installed; `test_ray.py` has the same
with Ray.
"""

import asyncio
import logging
import threading
import time
from concurrent.futures import Future
from contextlib import closing, contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
from support.worker_parts import TASKS, Engine, essence, fleet, pretend_server, settings

from gspo_agents.environments import make_pool
from gspo_env.config import Config
from gspo_env.distributed import pool as workers
from gspo_env.distributed.pool import WorkerCollector, WorkerDied, WorkerPool
from gspo_env.distributed.worker import Worker, WorkerSetup, WorkerStatus, most_episodes
from gspo_env.engines.vllm.settings import VLLMServer
from gspo_env.errors import ConfigError, MissingExtraError, RolloutError
from gspo_env.health.startup import check_player
from gspo_env.rollout.collector import Collector
from gspo_env.rollout.failures import FaultLog
from gspo_env.rollout.metrics import RolloutStats
from gspo_env.rollout.settings import RolloutConfig


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(workers, "_STATUS_SECONDS", 0.02)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with pretend_server(tmp_path_factory.mktemp("w")) as address:
        yield address


class Thread:
    """A worker in a thread with an event loop of its own; it can die like a process."""

    def __init__(self, setup):
        self.dead, self.silent, self.requests = threading.Event(), False, []
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.worker = Worker(setup)

    async def play(self, request, servers):
        self.requests.append(request)
        playing = asyncio.run_coroutine_threadsafe(self.worker.play(request, servers), self.loop)
        while not playing.done():
            if self.dead.is_set():
                raise WorkerDied("its thread is over")
            await asyncio.sleep(0.005)
        return playing.result()

    def status(self, servers):
        answer = Future()
        if self.dead.is_set():
            answer.set_exception(WorkerDied("its thread is over"))
        elif not self.silent:
            answer.set_result(asyncio.run(self.worker.status(servers)))
        return answer

    def close(self):
        answer = Future()
        answer.set_result(asyncio.run(self.worker.close()))
        return answer

    def reason(self, error):
        return str(error)

    def kill(self, pid=0):
        self.dead.set()


@contextmanager
def crew_of(config, chat, engine, start=Thread, **timeouts):
    """Yields a collector and the handles of its workers, dead ones included."""
    setup = WorkerSetup(
        make_pool=partial(make_pool, config),
        tokenizer=chat.tokenizer,
        history="template",
        end_ids=(),
        config=config.rollout,
        vocab_size=len(chat.tokenizer),
        servers=engine.server_list,
    )
    handles = []

    def begin(number):
        handles.append(start(setup))
        return handles[-1]

    with (
        closing(make_pool(config, FaultLog())) as pool,
        closing(WorkerPool(begin, engine, config.rollout, **timeouts)) as crew,
    ):
        yield WorkerCollector(engine, chat, pool, config.rollout, workers=crew), handles


def here(config, chat, engine):
    """Plays in this process; returns the groups and what is counted."""
    with closing(make_pool(config, FaultLog())) as pool:
        collector = Collector(engine, chat, pool, config.rollout)
        groups = collect(collector)
    return groups, pool.faults.counts


def collect(collector, size=3):
    return asyncio.run(collector.collect(TASKS, seed=5, group_size=size))


@pytest.mark.parametrize("fails", ["", "raises"])
def test_groups_faults_and_metrics_are_those_of_one_process(chat, server, fails, caplog):
    config = settings("ray:2", env={"fails": fails}, max_retries=1)
    alone, counted = here(config, chat, Engine(fleet(server)))
    assert sum(line.startswith("episode of") for line in caplog.messages) == bool(fails)
    with crew_of(config, chat, Engine(fleet(server))) as (collector, handles):
        groups = collect(collector)
        counts = collector.metrics()
        assert all(handle.requests for handle in handles)
    assert collector.pool.faults.counts == counted
    assert sum(counted.values()) == (12 if fails else 0)
    assert sum(line.startswith("episode of") for line in caplog.messages) == 2 * bool(fails)
    assert {t.weights_version for g in groups for e in g.episodes for t in e.turns} == {4}
    stats, same = (RolloutStats(played, 1.0).metrics() for played in (groups, alone))
    assert stats == same
    assert essence(groups) == essence(alone)
    assert counts == {
        "rollout/workers": 2.0,
        "rollout/workers_lost": 0.0,
        "rollout/worker_restarts": 0.0,
        "rollout/reissued_groups": 0.0,
    }


def test_held_out_tasks_are_drawn_again_as_in_one_process(chat, server):
    config, engine = settings("ray:2"), Engine(fleet(server))
    held_out = {"custom/Turns-v0": {"1", "3"}}
    with closing(make_pool(config, FaultLog())) as pool:
        alone = Collector(engine, chat, pool, config.rollout)
        played = alone.collect(TASKS, seed=1, group_size=2, held_out=held_out)
        expected = essence(asyncio.run(played))
    with crew_of(config, chat, engine) as (collector, _):
        played = collector.collect(TASKS, seed=1, group_size=2, held_out=held_out)
        assert essence(asyncio.run(played)) == expected
    assert sum(group[1] for group in expected) == 2


def test_the_groups_of_a_worker_that_dies_are_played_again_with_the_same_seeds(chat, server):
    config, engine = settings("ray:2"), Engine(fleet(server))
    expected = essence(here(config, chat, engine)[0])
    with crew_of(config, chat, engine) as (collector, handles):

        def end_one():
            while not handles[0].requests:
                time.sleep(0.001)
            handles[0].kill()

        threading.Thread(target=end_one).start()
        groups = collect(collector)
        while collector.metrics()["rollout/workers"] < 2:
            time.sleep(0.01)
        counts = collector.metrics()
    assert essence(groups) == expected
    assert counts["rollout/workers_lost"] == counts["rollout/worker_restarts"] == 1
    assert counts["rollout/reissued_groups"] >= 1
    assert len(handles) == 3


def test_a_worker_that_does_not_answer_is_ended_and_replaced(chat, server, caplog):
    config, engine = settings("ray:1"), Engine(fleet(server))

    class Silent(Thread):
        async def play(self, *arguments):
            if not self.dead.is_set() and len(made) == 1:
                self.silent = True
                while not self.dead.is_set():
                    await asyncio.sleep(0.01)
                raise WorkerDied("killed")
            return await super().play(*arguments)

    made = []

    def start(setup):
        made.append(Silent(setup))
        return made[-1]

    with crew_of(config, chat, engine, start, answer_timeout=0.3) as (collector, _):
        groups = collect(collector)
    assert essence(groups) == essence(here(config, chat, engine)[0])
    assert (
        "worker 0 is lost: it has not answered for 0.3 s; it played custom/Turns-v0 with seed 0"
        in (caplog.text)
    )
    assert collector.workers.restarts == 1


class Suspended:
    """Answers after a while; at one question, the whole process stands still."""

    def __init__(self, question):
        self.question, self.questions = question, 0

    def status(self, servers):
        self.questions += 1
        if self.questions == self.question:
            time.sleep(1.5)
        answer, status = Future(), WorkerStatus(pid=1, idle=0.0, stalled=0.0, waits="")
        threading.Timer(0.2, answer.set_result, [status]).start()
        return answer

    def close(self):
        return Future()

    def kill(self, pid=0):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("question", [1, 3])
def test_a_trainer_that_was_suspended_takes_no_worker_for_dead(question, monkeypatch):
    monkeypatch.setattr(workers, "_STATUS_SECONDS", 0.05)
    monkeypatch.setattr(workers, "_CLOSE_SECONDS", 0.0)
    handle, engine = Suspended(question), SimpleNamespace(server_list=None)
    limits, times = RolloutConfig(workers="ray:1"), {"start_timeout": 1.0, "answer_timeout": 1.0}
    with closing(WorkerPool(lambda number: handle, engine, limits, **times)) as pool:
        while handle.questions < question + 3 and not pool.lost:
            time.sleep(0.01)
        assert (pool.lost, pool.metrics()["rollout/workers"]) == (0, 1.0)


def lost(chat, server, start, words, workers="ray:2", timeouts=None, **limits):
    """Collects with workers that are all lost, with an error that has these words."""
    config, engine = settings(workers, **limits), Engine(fleet(server))
    with (
        crew_of(config, chat, engine, start, **(timeouts or {})) as (collector, handles),
        pytest.raises(RolloutError, match=words),
    ):
        collect(collector)
    return collector, handles


class Mortal(Thread):
    """Dies with the first group that it plays."""

    async def play(self, *arguments):
        self.kill()
        raise WorkerDied("out of memory")


def test_restarts_are_bounded_and_the_error_names_the_last_task(chat, server):
    words = r"none of the 2 workers is left; .*out of memory; it played custom/T"
    collector, handles = lost(chat, server, Mortal, words, max_worker_restarts=3)
    assert len(handles) == 5
    assert collector.workers.lost == 5


class NeverReady(Thread):
    """Fails when its status is requested, or never answers."""

    def status(self, servers):
        if self.fails == "raises":
            raise ConnectionError("the cluster is gone")
        if self.fails == "dies":
            self.kill()
            return super().status(servers)
        return Future()

    def reason(self, error):
        return "No module named 'shop'"


@pytest.mark.parametrize(
    ("fails", "reason"),
    [
        ("dies", "No module named 'shop'"),
        ("raises", "ConnectionError: the cluster is gone"),
        ("hangs", "it has not started within 0.1 s"),
    ],
)
def test_a_worker_that_never_gets_ready_is_lost_and_not_replaced(chat, server, fails, reason):
    start, quick = type("Fails", (NeverReady,), {"fails": fails}), {"start_timeout": 0.1}
    _, handles = lost(chat, server, start, f"{reason}; it played nothing", timeouts=quick)
    assert len(handles) == 2


def test_a_worker_that_cannot_be_started_again_is_lost(chat, server):
    made = []

    def start(setup):
        if made:
            raise ConnectionError("the cluster is gone")
        made.append(Mortal(setup))
        return made[-1]

    words = r"none of the 1 workers is left; .*the cluster is gone"
    lost(chat, server, start, words, "ray:1")


def test_an_error_of_a_group_reaches_the_trainer_as_itself(chat, server):
    config, engine = settings("ray:2"), Engine(fleet(server, lost="every server is lost"))
    engine.replace_servers(fleet(lost="every server is lost"))
    with (
        crew_of(config, chat, engine) as (collector, _),
        pytest.raises(Exception, match=r"^every server is lost$"),
    ):
        collect(collector)


def test_a_server_that_fails_a_worker_is_told_and_its_requests_go_elsewhere(chat, server, tmp_path):
    config = settings("ray:1")
    with pretend_server(tmp_path) as mortal:
        (tmp_path / "dies").touch()
        engine = Engine(fleet(mortal, server))
        with crew_of(config, chat, engine) as (collector, _):
            groups = collect(collector)
            while not engine.told:
                time.sleep(0.01)
    assert essence(groups) == essence(here(config, chat, Engine(fleet(server)))[0])
    assert {address for address, _ in engine.told} == {mortal}
    assert engine.told[0][1].startswith("worker 0: ")


def test_a_restarted_server_serves_again_and_a_lost_one_does_not(server):
    engine = Engine(fleet(server))
    engine._lose(engine._servers[0], "it hangs")
    assert engine.take_failed() == {server: "it hangs"}
    engine.replace_servers(fleet(server))
    assert [s.state for s in engine._servers] == ["lost"]
    again = type(server)(address=server.address, socket=server.socket, pid=server.pid + 1)
    engine.replace_servers(fleet(again, weights_version=3))
    assert [s.state for s in engine._servers] == ["serving"]
    assert engine.weights_version == 3


def test_no_worker_has_more_episodes_than_its_share(chat, tmp_path):
    config, most = settings("ray:2", concurrency=4), []

    async def watched(collector, handles):
        playing = asyncio.create_task(collector.collect(TASKS, seed=0, group_size=3))
        while not playing.done():
            most.extend(len(handle.worker.collector.progress) for handle in handles)
            await asyncio.sleep(0.002)
        await playing

    with (
        pretend_server(tmp_path, seconds=0.02) as slow,
        crew_of(config, chat, Engine(fleet(slow))) as made,
    ):
        asyncio.run(watched(*made))
    assert max(most) == most_episodes(config.rollout) == 2


def test_the_log_says_which_workers_are_waited_for(chat, tmp_path):
    config = settings("ray:2")
    with pretend_server(tmp_path, seconds=0.3) as slow:
        engine = Engine(fleet(slow))
        with crew_of(config, chat, engine) as (collector, _):
            told = []

            async def look():
                playing = asyncio.create_task(collector.collect(TASKS, seed=0, group_size=2))
                while not (told and "wait for the engine" in told[-1]):
                    told.append(collector.workers.describe())
                    await asyncio.sleep(0.02)
                return await playing

            asyncio.run(look())
    assert "worker 0 has been starting for 0 s" in told[0]
    assert "episodes wait for the engine (longest" in told[-1]
    assert "custom/Turns-v0 with seed" in told[-1]


def test_a_cancelled_collection_leaves_no_job_with_a_worker(chat, tmp_path):
    config = settings("ray:1")
    with pretend_server(tmp_path, seconds=0.5) as slow:
        engine = Engine(fleet(slow))
        with crew_of(config, chat, engine) as (collector, handles):

            async def stopped():
                playing = asyncio.create_task(collector.collect(TASKS, seed=0, group_size=2))
                while not handles[0].requests:
                    await asyncio.sleep(0.01)
                playing.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await playing

            asyncio.run(stopped())
            assert collector.workers._workers[0].requests == []


def test_lines_of_a_workers_log_reach_the_trainers(chat, server, caplog):
    with crew_of(settings("ray:1"), chat, Engine(fleet(server))) as (collector, _):
        collect(collector)
        logging.getLogger("gspo_env.rollout.pool").warning("2 environments have not closed")
        while "worker 0: 2 environments have not closed" not in caplog.text:
            time.sleep(0.01)


@pytest.mark.parametrize("text", ["ray", "ray:0", "ray:x", "ray: 2", "threads", "", "ray:99999"])
def test_workers_of_another_form_are_refused(text):
    with pytest.raises(ConfigError, match="expected 'asyncio', or 'ray:8'"):
        RolloutConfig(workers=text)


def test_workers_need_servers_and_at_least_one_episode_each():
    with pytest.raises(ConfigError, match="at least one episode in flight for each"):
        RolloutConfig(workers="ray:9", concurrency=8)
    limits = RolloutConfig(workers="ray:2", ray_address="10.0.0.1:6379")
    with pytest.raises(ConfigError, match="expected --engine vllm-server"):
        check_player(Config(model="given", rollout=limits))
    with pytest.raises(ConfigError, match="expected --addresses of servers"):
        check_player(Config(model="given", rollout=limits, engine=VLLMServer()))


def test_without_ray_the_error_names_the_extra(monkeypatch):
    config = Config(model="m", rollout=RolloutConfig(workers="ray:2"), engine=VLLMServer())
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'gspo-env\[ray\]'"):
        check_player(config)
