"""Classes for TRL's `environment_factory` are environments as they are."""

from pathlib import Path

import pytest
from support import trl_shop
from support.trl_shop import ROWS, Counter, Shop

from gspo_env import format_tool_call
from gspo_env.check.environment import check_env
from gspo_env.env.registration import make_env
from gspo_env.errors import ConfigError, UnknownEnvironmentError
from gspo_env.recipes.build import build_model, build_tokenizer
from gspo_env.recipes.tiny import Tiny

FILE = Path(trl_shop.__file__)


def play(env, actions, **reset):
    """The first observation and those of the actions; the last step's reward, flags and `info`."""
    shown, last = [env.reset(**{"seed": 0, **reset})[0]], ()
    for action in actions:
        observation, *last = env.step(action)
        shown.append(observation)
    return shown, last


def call(name, **arguments):
    return format_tool_call(name, arguments)


def test_a_class_of_a_file_is_played_as_it_is():
    env = make_env(f"{FILE}:Shop", data=ROWS, held_out=0)
    calls = [call("price", good="apple"), call("answer", total=8), "Both cost 8."]
    shown, (reward, terminated, truncated, info) = play(env, calls, options={"row": 0})
    assert shown == ["Price of: apple bread", "3", "done", ""]
    assert (reward, terminated, truncated) == (1.0, True, False)
    assert info["reward_parts"] == {"Shop": 1.0}
    assert env.reset(seed=0, options={"row": 1})[0] == "Nothing."
    assert [tool.name for tool in env.unwrapped.tools] == ["answer", "price", "stock"]
    assert env.unwrapped.tools[2].parameters["required"] == ["good"]


def test_what_tools_return_and_raise_reads_as_in_trl():
    env = make_env(Shop, data=ROWS, held_out=0)
    shown, _ = play(
        env,
        [
            call("stock", good="apple", days=2) + "\n" + call("price", good="bread"),
            call("price", good="melon"),
            call("price", thing_to_buy="apple"),
            call("_hidden"),
        ],
        options={"row": 0},
    )
    assert shown[1:] == [
        "5\n{'good': 'apple', 'left': 2}",  # asynchronous tools answer last
        "{'error': \"'melon'\"}",
        "{'error': \"Shop.price() got an unexpected keyword argument 'thing_to_buy'\"}",
        "{'error': 'Tool _hidden not found.'}",
    ]


def test_reward_functions_of_trl_get_the_environments_and_parsed_messages():
    trl_shop.seen.clear()
    env = make_env(
        Shop, data=ROWS, held_out=0, rewards=[trl_shop.visits], weights=[0.25], blocking=False
    )
    _, (reward, *_, info) = play(env, [call("price", good="apple"), "No."], options={"row": 0})
    assert (reward, info["reward_parts"]) == (0.25, {"visits": 1.0, "Shop": 0.0})
    (given,) = trl_shop.seen
    assert given["goods"] == [["apple", "bread"]]
    assert given["prompts"] == [[{"role": "user", "content": "Price of: apple bread"}]]
    function = {"name": "price", "arguments": {"good": "apple"}}
    assert given["completions"] == [
        [
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"type": "function", "function": function}],
            },
            {"role": "tool", "name": "price", "content": "3"},
            {"role": "assistant", "content": "No."},
        ]
    ]


def test_the_last_turn_calls_no_tool():
    env = make_env(Shop, data=ROWS, held_out=0, max_turns=2)
    calls = [call("answer", total=1), call("answer", total=8)]
    shown, (reward, terminated, truncated, _) = play(env, calls, options={"row": 0})
    assert (shown[-1], reward, terminated, truncated) == ("", 0.0, False, True)


def test_the_attribute_reward_counts_and_the_seed_gives_the_task():
    one, two = make_env(f"{FILE}:Counter"), make_env(Counter)
    calls = [call("count"), call("count"), "Enough."]
    shown, (reward, *_) = play(one, calls)
    assert reward == 1.0
    assert shown == play(two, calls)[0]
    assert shown[0] != one.reset(seed=1)[0]
    assert "task_key" not in one.reset(seed=1)[1]


def test_what_nothing_scores_or_shows_is_refused():
    with pytest.raises(ConfigError, match=r"Silent has no get_reward\(\) and sets no attribute"):
        make_env(f"{FILE}:Silent").reset(seed=0)
    with pytest.raises(ConfigError, match=r"tool Untyped\.price: .*good.* type hint"):
        make_env(f"{FILE}:Untyped")
    with pytest.raises(UnknownEnvironmentError, match="it has Shop, Counter, Silent, Untyped"):
        make_env(f"{FILE}:Shopp")


def test_the_check_accepts_both_kinds():
    for env in (make_env(Shop, data=ROWS, held_out=0), make_env(Counter)):
        assert check_env(env).score == "turns"


TALKS = {
    "Price of: apple bread": [
        f"{call('price', good='apple')}\n{call('price', good='bread')}",
        call("price", good="melon"),
        call("answer", total=8),
        "Both cost 8.",
    ],
    "Nothing.": [call("stock", god="x"), call("stock", good="x"), call("answer", total=0), "0."],
}
"""What is answered to a prompt, turn by turn; more turns are cut."""


@pytest.mark.adapters
@pytest.mark.parametrize("most", [2, None])
def test_trls_own_rollout_gives_the_same_messages_and_rewards(most, tmp_path, monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    import torch
    import trl
    from datasets import Dataset

    tokenizer = build_tokenizer(["Price of: apple bread Nothing."])
    templates = Path(trl.__file__).parent / "chat_templates"
    tokenizer.chat_template = (templates / "qwen3.jinja").read_text()
    model = build_model(Tiny(hidden_size=16), len(tokenizer), tokenizer.eos_token_id, 0)

    class Scripted(trl.GRPOTrainer):
        def _generate_single_turn(self, prompt_ids, images, fields, num_generations, **more):
            texts = [tokenizer.decode(ids) for ids in prompt_ids]
            turns = [text.count("<|im_start|>assistant\n") - 1 for text in texts]
            said = [next(talk for shown, talk in TALKS.items() if shown in text) for text in texts]
            answers = [talk[turn] for talk, turn in zip(said, turns, strict=True)]
            return [[*tokenizer.encode(a), tokenizer.eos_token_id] for a in answers], None

        def _calculate_rewards(self, *arguments):
            self.rewards = super()._calculate_rewards(*arguments)
            return self.rewards

    settings = trl.GRPOConfig(
        output_dir=str(tmp_path),
        per_device_train_batch_size=4,
        num_generations=2,
        max_completion_length=2000,
        max_tool_calling_iterations=most,
        max_steps=1,
        use_cpu=True,
        bf16=False,
        report_to=[],
    )
    trainer = Scripted(
        model=model,
        reward_funcs=trl_shop.visits,
        args=settings,
        train_dataset=Dataset.from_list(ROWS),
        processing_class=tokenizer,
        environment_factory=Shop,
    )
    trl_shop.seen.clear()
    trainer._generate_and_score_completions([ROWS[0], ROWS[0], ROWS[1], ROWS[1]])
    (theirs,) = trl_shop.seen

    limit = {} if most is None else {"max_turns": most + 1}
    env = make_env(Shop, data=ROWS, held_out=0, rewards=trl_shop.visits, **limit)
    for row, talk in enumerate(TALKS.values()):
        trl_shop.seen.clear()
        _, (reward, *_, info) = play(env, talk[: env.unwrapped.max_turns], options={"row": row})
        (ours,) = trl_shop.seen
        assert ours["prompts"] == [theirs["prompts"][2 * row]]
        assert ours["completions"] == [theirs["completions"][2 * row]]
        assert ours["goods"] == [theirs["goods"][2 * row]]
        parts = torch.tensor([info["reward_parts"]["visits"], info["reward_parts"]["Shop"]])
        assert torch.equal(parts, trainer.rewards[2 * row])
        assert reward == parts.sum()
