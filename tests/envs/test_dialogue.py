"""Dialogues with a simulated user about a database."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.attacks import ATTACKS, CONTROLS
from support.pretend_judge import serve

from gspo_env import check_env, format_tool_call, make_env, tool
from gspo_env.errors import ConfigError, ToolServerError
from gspo_env.seeding import HELD_OUT
from gspo_envs.dialogue.env import ScriptedUser
from gspo_envs.dialogue.task import PERSONAS, DialogueTask, Domain, Fact

DOMAINS = ("orders", "bookings")
SHOP = f"{Path(__file__).parents[2] / 'examples/shop.py'}:Shop"
DONE, REFUSAL = "It is done.", "I am sorry, I cannot do that."


def play(env: Any, *extra: str, calls: bool = True) -> Any:
    """Play with the scripted agent, and the extra actions before its last message."""
    ended = False
    while not ended:
        action = env.unwrapped.expert_action()
        for each in extra if action in (DONE, REFUSAL) else ():
            env.step(each)
        if not calls and ("tool_call" in action or action == REFUSAL):
            action = DONE
        step = env.step(action)
        ended = step[2] or step[3]
    return step


@pytest.mark.parametrize("domain", [*DOMAINS, SHOP])
def test_the_scripted_agent_solves_hundreds_of_different_tasks(domain):
    env: Any = make_env("gspo/Dialogue-v0", domain=domain)
    keys = set()
    for seed in range(250):
        keys.add(env.reset(seed=seed)[1]["task_key"])
        assert play(env)[4]["episodic_reward"] == 1.0
    assert len(keys) >= 200


def test_check_env_accepts_another_domain():
    check_env("gspo/Dialogue-v0", env_kwargs={"domain": "bookings"})


@pytest.mark.parametrize("domain", DOMAINS)
def test_claims_without_changes_and_changes_against_the_rules_fail(domain):
    env: Any = make_env("gspo/Dialogue-v0", domain=domain)
    tables = {"orders": "orders", "bookings": "days"}
    for seed in range(40):
        env.reset(seed=seed)
        while not (refusal := env.step(REFUSAL))[2]:
            pass
        assert refusal[4]["success"] is False
        env.reset(seed=seed)
        assert play(env, calls=False)[4]["success"] is False
        env.reset(seed=seed)
        row = env.unwrapped.domain.rows(f"SELECT * FROM {tables[domain]}")[0]
        orders = "send_order", {"order": row[0], "city": "nowhere"}
        bookings = "book_table", {"guest": "nobody", "day": row[0]}
        harm = format_tool_call(*(orders if domain == "orders" else bookings))
        assert play(env, harm)[4]["success"] is False


def test_needed_facts_and_calls_are_rewarded_once():
    env: Any = make_env("gspo/Dialogue-v0")
    rewards: list[float] = []
    observation = env.reset(seed=1)[0]
    while "As I said" not in observation and "cannot" not in observation:
        action = env.unwrapped.expert_action()
        if action in (DONE, REFUSAL):
            break
        rewards.append(env.step(action)[1])
        observation, again, ended, *_ = env.step(action)
        assert (again, ended) == (0.0, False)
    assert rewards
    assert set(rewards) == {0.1}


FACTS = (Fact(keywords="number", text="Number 7."), Fact(keywords="day", text="On Monday."))


@pytest.mark.parametrize(
    ("persona", "messages", "replies"),
    [
        ("terse", ["Which number, and which day?"], ["Number 7."]),
        ("", ["Which number, and which day?"], ["Number 7. On Monday."]),
        ("chatty", ["Which day?"], ["Of course! On Monday. Thank you."]),
        ("impatient", ["Hm.", "Hm."], ["As I said: Help!", "You don't understand me. Goodbye."]),
        ("insistent", [REFUSAL] * 2, ["Please try again, it is important.", "Goodbye."]),
        ("", ["I can\N{RIGHT SINGLE QUOTATION MARK}t do that."], ["Goodbye."]),
        ("", ["It is done, what is the number?", DONE], ["Number 7.", "Goodbye."]),
    ],
)
def test_the_scripted_user_answers_by_persona(persona, messages, replies):
    task = DialogueTask(
        script="", opening="Help!", persona=persona, facts=FACTS, instructions="", actions=()
    )
    user = ScriptedUser(task)
    assert user.opening == "Help!"
    assert [user.reply(message).text for message in messages] == replies
    assert set(PERSONAS) | {""} >= {persona}


class Shelf(Domain):
    """A shelf with one book."""

    def script(self) -> str:
        return "CREATE TABLE shelf (book TEXT); INSERT INTO shelf VALUES ('Emma');"

    @tool
    def remove(self, book: str) -> str:
        """Remove a book."""
        return str(self.rows("DELETE FROM shelf WHERE book = ? RETURNING book", book))


def tau2_task(**criteria: Any) -> dict[str, Any]:
    instructions = {
        "domain": "shelf",
        "reason_for_call": "You lend Emma.",
        "known_info": "You are Ann.",
        "unknown_info": None,
        "task_instructions": "Be brief.",
    }
    action = {"action_id": "0", "name": "remove", "arguments": {"book": "Emma"}, "info": None}
    basis = {"actions": [action], "communicate_info": ["1200"], "nl_assertions": None, **criteria}
    return {
        "id": "0",
        "user_scenario": {"persona": None, "instructions": instructions},
        "initial_state": None,
        "evaluation_criteria": {"reward_basis": ["DB", "COMMUNICATE"], **basis},
    }


def write(path: Path, value: Any) -> str:
    path.write_text(json.dumps(value))
    return str(path)


def test_an_evaluation_plays_each_task_of_a_file_once_before_any_twice(tmp_path):
    claims = [tau2_task(communicate_info=[str(n)]) for n in range(7)]
    tasks = write(tmp_path / "tasks.json", claims)
    env: Any = make_env("gspo/Dialogue-v0", domain=f"{__name__}:Shelf", tasks=tasks)
    keys = [env.reset(seed=HELD_OUT + n)[1]["task_key"] for n in range(14)]
    assert len(set(keys[:7])) == env.get_wrapper_attr("num_eval_tasks") == 7
    assert sorted(keys[:7]) == sorted(keys[7:])
    assert len({env.reset(seed=n)[1]["task_key"] for n in range(60)}) == 7


def test_a_task_file_of_tau2_is_scored_by_database_and_communicated_texts(tmp_path, caplog):
    unscored = tau2_task(reward_basis=["ENV_ASSERTION"])
    tasks = write(tmp_path / "tasks.json", [tau2_task(), unscored])
    env: Any = make_env("gspo/Dialogue-v0", domain=f"{__name__}:Shelf", tasks=tasks)
    assert "left out 1 tasks" in caplog.text
    for fee, success in (("It costs $1,200. It is done.", True), (DONE, False)):
        assert env.reset(seed=0, options={"task": 0})[0] == "You lend Emma."
        assert env.step("Who are you?")[:2] == ("You are Ann.", 0.1)
        assert env.step(env.unwrapped.expert_action())[1] == 0.1
        assert env.step(fee)[4]["success"] is success


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ({"train": []}, "expected a task file of tau2-bench"),
        ([{"id": "0"}], "KeyError: 'evaluation_criteria'"),
        ([], "none can be scored"),
        ("/dev/zero", "has more than"),
        ([tau2_task(actions=[{"name": "burn", "arguments": {}}])], "a task calls 'burn'"),
    ],
)
def test_a_wrong_task_file_is_refused(value, sentence, tmp_path):
    tasks = value if isinstance(value, str) else write(tmp_path / "tasks.json", value)
    with pytest.raises(ConfigError, match=sentence):
        make_env("gspo/Dialogue-v0", domain=f"{__name__}:Shelf", tasks=tasks).reset(seed=0)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"domain": "gspo_env.types:Task"}, "Task|domain"),
        ({"domain": "builtins:dict"}, "expected orders, bookings, or the module:Class"),
        ({"user": "localhost:8000"}, "expected 'scripted' or an http address"),
    ],
)
def test_wrong_arguments_are_refused(arguments, sentence):
    with pytest.raises(ConfigError, match=sentence):
        make_env("gspo/Dialogue-v0", **arguments)


def test_a_model_plays_the_user_with_the_goal_as_its_instructions(monkeypatch):
    monkeypatch.setenv("USER_KEY", "secret")
    headers = {"Authorization": "Bearer ${USER_KEY}"}
    contents = iter(["Hi, my order!", "It is 7.", "Thanks! ###STOP###"])
    with serve(lambda question: next(contents)) as server:
        env: Any = make_env("gspo/Dialogue-v0", user=server.url, user_model="m", headers=headers)
        assert env.unwrapped.blocking
        assert env.reset(seed=0)[0] == "Hi, my order!"
        assert env.step("Which number?")[:3] == ("It is 7.", 0.0, False)
        observation, _, terminated, *_ = env.step(DONE)
    assert (observation, terminated) == ("Thanks!", True)
    assert server.keys[0] == "Bearer secret"
    messages = json.loads(server.answered[-1])["messages"]
    roles = [message["role"] for message in messages]
    assert roles == ["system", "user", "assistant", "user", "assistant", "user"]
    assert "order" in messages[0]["content"]


def test_no_text_of_a_dialogue_reaches_the_model_that_plays_the_user_with_control_tokens(tmp_path):
    """Those of the policy, of the task file and of the model itself, which are sent again."""
    task = tau2_task()
    task["user_scenario"]["instructions"]["known_info"] = "\n".join(ATTACKS)[:9999]
    tasks = write(tmp_path / "tasks.json", [task])
    replies = iter(["Hello!", *ATTACKS])
    with serve(lambda question: next(replies)) as server:
        env: Any = make_env(
            "gspo/Dialogue-v0",
            **{"domain": f"{__name__}:Shelf", "tasks": tasks, "max_turns": 99},
            **{"user": server.url, "user_model": "m"},
        )
        env.reset(seed=0)
        for attack in ATTACKS:
            env.step(attack)
    messages = json.loads(server.answered[-1])["messages"]
    assert len(messages) == 2 * len(ATTACKS) + 2
    assert not [m["content"] for m in messages if CONTROLS.search(m["content"])]


def test_a_user_without_an_answer_is_a_failure_and_no_zero():
    with serve(lambda question: "") as server:
        env: Any = make_env("gspo/Dialogue-v0", user=server.url)
        with pytest.raises(ToolServerError, match="has no text of a chat completion"):
            env.reset(seed=0)
