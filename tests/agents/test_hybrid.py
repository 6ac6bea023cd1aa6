"""Models that packed rows would change train one sequence a row."""

import pytest
from support.hybrid import Hybrid, train

from gspo_env.engines.embedded.unpacked import ModelCache
from gspo_env.errors import ModelError
from gspo_env.model import check


def short(kind, folder, **changes):
    recipe = Hybrid(
        kind=kind, hidden_size=32, demonstrations=16, imitation_steps=4, imitation_batch=8
    )
    settings = {"steps": 1, "tasks_per_step": 2, "eval_every": 0, "eval_tasks": 1, **changes}
    settings["rollout"] = {"group_size": 2, "max_turn_tokens": 6, "max_turns": 2}
    return train(recipe, str(folder / "run"), **settings)


@pytest.mark.parametrize(("rank", "large"), [(0, False), (2, False), (2, True)])
def test_a_run_with_a_hybrid_says_so_once_and_trains_on_what_its_engine_sampled(
    rank, large, tmp_path, caplog, monkeypatch
):
    if large:  # then the preflight adds an adapter and removes it
        monkeypatch.setattr("gspo_agents.gspo.is_small", lambda model: False)
    learner = {"lora_rank": rank, "microbatch_tokens": 512}  # the preflight measures such a row
    history = short("LFM2", tmp_path, learner=learner)
    (difference,) = (m["train/logprob_diff_max"] for _, m in history if "train/loss" in m)
    assert difference <= check.BOUND
    assert caplog.text.count("one sequence a row") == 1


def test_a_model_that_the_engine_refuses_stops_the_run_before_it_has_a_folder(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(ModelCache, "feed", None)
    with pytest.raises(ModelError, match=r"Lfm2ForCausalLM.*expected the engine vllm"):
        short("LFM2", tmp_path)
    assert not (tmp_path / "run").exists()
