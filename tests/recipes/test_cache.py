"""Cached warm-ups: the same model as without, and nothing that is damaged, foreign or outdated."""

from __future__ import annotations

import json
import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from gspo_agents.gspo import GSPOAgent
from gspo_env.config import Config
from gspo_env.recipes import build as embedded
from gspo_env.recipes.cache import WarmUp, WarmUpCache, cache_folder, make_key
from gspo_env.recipes.tiny import Tiny

TINY = Tiny(hidden_size=16, layers=1, heads=2, demonstrations=30, imitation_steps=6)
KEY = "a" * 64


def config(**changes):
    recipe = changes.pop("recipe", TINY)
    return Config.from_recipe(
        recipe,
        **{
            "env": "gspo/KeyDoor-v0",
            "steps": 2,
            "tasks_per_step": 2,
            "eval_tasks": 4,
            "tracker": "none",
        }
        | changes,
    )


def trained(folder, **changes):
    agent = GSPOAgent(config=config(output=str(folder), **changes))
    history = [
        {k: v for k, v in m.items() if not k.startswith("time/") and "per_second" not in k}
        for _, m in agent.train()
    ]
    return history, agent


def entry(size=4):
    weights = {"w": torch.arange(size, dtype=torch.float32)}
    return WarmUp(weights=weights, tokenizer="{}", undemonstrated=[], left_out=3)


def test_a_run_from_the_cache_has_the_numbers_of_one_that_imitates(tmp_path, monkeypatch, capsys):
    first, one = trained(tmp_path / "one")
    (place,) = cache_folder().iterdir()
    monkeypatch.setattr(embedded, "warm_up", None)  # it is not called again
    monkeypatch.setattr(embedded, "demonstrate", None)
    again, other = trained(tmp_path / "two")
    assert "warm-up from the cache" in capsys.readouterr().out
    assert again == first
    assert other._left_out == one._left_out
    assert other.tokenizer.get_vocab() == one.tokenizer.get_vocab()
    for name, value in one.model.state_dict().items():
        assert torch.equal(other.model.state_dict()[name], value)
    assert [p.name for p in cache_folder().iterdir()] == [place.name]


def test_before_its_warm_up_an_agent_has_random_weights_with_a_cache_too():
    one, other = (GSPOAgent(config=config()) for _ in range(2))
    one.warm_up()
    late = GSPOAgent(config=config())
    before = {name: value.clone() for name, value in late.model.state_dict().items()}
    for name, value in other.model.state_dict().items():
        assert torch.equal(before[name], value)
    late.warm_up()
    assert not torch.equal(late.model.lm_head.weight, before["lm_head.weight"])
    for name, value in one.model.state_dict().items():
        assert torch.equal(late.model.state_dict()[name], value)


def test_without_the_cache_nothing_is_written():
    GSPOAgent(
        config=config(
            recipe={
                "name": "tiny",
                "cache": False,
                "imitation_steps": 1,
                "demonstrations": 4,
                "hidden_size": 16,
            }
        )
    ).warm_up()
    assert not cache_folder().exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 1},
        {"env_kwargs": {"decoys": 1}},
        {"eval_tasks": 5},
        {"recipe": Tiny(hidden_size=16, layers=1, heads=2, demonstrations=31, imitation_steps=6)},
        {"rollout": {"max_turn_tokens": 33, "max_context": 512}},
    ],
)
def test_another_setting_has_another_warm_up(changes):
    from gspo_agents.setup import _warm_up_key

    assert _warm_up_key(config()) == _warm_up_key(config(steps=9, output="elsewhere"))
    assert None is not _warm_up_key(config(**changes)) != _warm_up_key(config())


def test_the_key_follows_the_sources_and_the_files_that_are_named(tmp_path):
    env, beside, data = (tmp_path / name for name in ("env.py", "helper.py", "rows.jsonl"))
    for path in (env, beside, data):
        path.write_text("1")

    def key(**arguments):
        return make_key(f"{env}:Shop", {"rows": str(data)} | arguments, {"seed": 0})

    known = {key()}
    for path in (env, beside, data):
        path.write_text("2")
        known.add(key())
    known |= {key(more=1), key(more={"list": [str(beside)]})}
    assert len(known) == 6
    assert None not in known
    assert key() in known
    assert key(folder=str(tmp_path)) is None  # its files are not read


@pytest.mark.parametrize("env", ["gspo/MCP-v0", "gspo/GEM-v0", "shop:Env-v0", "a.b:Env"])
def test_an_environment_that_may_change_elsewhere_is_not_cached(env):
    assert make_key(env, {}, {}) is None
    assert make_key("gspo/Dataset-v0", {"data": "hub/name"}, {}) is None


def test_rows_that_are_given_as_they_are_belong_to_the_key():
    rows = [{"prompt": f"What is {n} + {n}?"} for n in range(100)]
    key = make_key("gspo/Dataset-v0", {"data": rows}, {})
    assert key is not None
    assert key != make_key("gspo/Dataset-v0", {"data": rows[1:]}, {})
    assert make_key("gspo/Lookup-v0", {"x": object()}, {}) is None


def break_bytes(place):
    data = bytearray((place / "weights.safetensors").read_bytes())
    data[-1] ^= 1
    (place / "weights.safetensors").write_bytes(bytes(data))


def cut(place):
    (place / "weights.safetensors").write_bytes(b"")


def lie(place):
    facts = json.loads((place / "warm_up.json").read_text())
    (place / "warm_up.json").write_text(json.dumps(facts | {"left_out": 0}))


def empty_list(place):
    (place / "warm_up.json").write_text("[]")


def no_text(place):
    (place / "warm_up.json").write_bytes(b"\xff\xfe")


def lose(place):
    (place / "weights.safetensors").unlink()


@pytest.mark.parametrize("harm", [break_bytes, cut, lie, empty_list, no_text, lose])
def test_a_damaged_entry_is_named_deleted_and_made_again(tmp_path, caplog, harm):
    cache = WarmUpCache(tmp_path / "cache")
    cache.save(KEY, entry())
    harm(tmp_path / "cache" / KEY)
    with caplog.at_level(logging.WARNING):
        assert cache.load(KEY) is None
    assert str(tmp_path / "cache" / KEY) in caplog.text
    assert "damaged" in caplog.text
    assert not list((tmp_path / "cache").iterdir())
    cache.save(KEY, entry())
    assert cache.load(KEY).left_out == 3


def test_the_folder_is_private_and_one_that_others_can_write_is_not_used(tmp_path, caplog):
    cache = WarmUpCache(tmp_path / "cache")
    cache.save(KEY, entry())
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "cache" / KEY).stat().st_mode & 0o777 == 0o700
    os.chmod(tmp_path / "cache", 0o777)
    with caplog.at_level(logging.WARNING):
        assert cache.load(KEY) is None
    assert "can be written by others" in caplog.text


def test_the_entries_that_were_used_longest_ago_are_deleted(tmp_path):
    cache = WarmUpCache(tmp_path, most=4000)
    for n, name in enumerate("abc"):
        cache.save(name, entry(300))
        os.utime(tmp_path / name, (n, n)) if name != "c" else None
        if name == "b":
            assert cache.load("a")  # now it is newer than b
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "c"]
    cache.save("d", entry(2000))  # larger than everything together
    assert cache.load("d") is None


def test_writers_at_the_same_time_leave_one_whole_entry(tmp_path):
    cache, gate = WarmUpCache(tmp_path), threading.Barrier(6)

    def write(_):
        gate.wait()
        cache.save(KEY, entry(10_000))
        return cache.load(KEY)

    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(write, range(6)))
    assert all(torch.equal(one.weights["w"], entry(10_000).weights["w"]) for one in found)
    assert [p.name for p in tmp_path.iterdir()] == [KEY]


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "file").write_text("")
    cache = WarmUpCache(tmp_path / "file" / "cache")
    cache.save(KEY, entry())
    assert cache.load(KEY) is None
