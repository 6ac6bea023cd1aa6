"""A reward model of one's own: `python examples/reward_model.py`.

A small classifier learns from pairs of answers which one people prefer (Bradley-Terry). The policy
then imitates answers of both kinds and is trained on the classifier's score.
"""

import random
import sys

import torch
from transformers import Qwen3Config, Qwen3ForSequenceClassification

from gspo_agents.gspo import GSPOAgent
from gspo_env.config import Config
from gspo_env.recipes.build import build_tokenizer

FOLDER = "reward_model"
GOODS = ["tea", "bread", "milk", "rice", "soup", "cake", "fish", "salt"]
KIND, RUDE = "Of course , here is the {} .", "Get the {} yourself !"


def chats(answer):
    """One conversation for each good, with this answer."""
    return [
        [
            {"role": "user", "content": f"May I have the {good} ?"},
            {"role": "assistant", "content": answer.format(good)},
        ]
        for good in GOODS
    ]


def train_reward_model(steps=60):
    """Learns that the kind answer of each pair is preferred, and saves the classifier."""
    torch.manual_seed(0)
    tokenizer = build_tokenizer(m["content"] for a in (KIND, RUDE) for c in chats(a) for m in c)
    shape = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, head_dim=16, num_labels=1,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model = Qwen3ForSequenceClassification(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def score(answer):
        texts = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats(answer)]
        return model(**tokenizer(texts, padding=True, return_tensors="pt")).logits[:, 0]

    for _ in range(steps):
        loss = -torch.nn.functional.logsigmoid(score(KIND) - score(RUDE)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(FOLDER)
    tokenizer.save_pretrained(FOLDER)
    print(f"reward model: loss {loss.item():.3f}")


def main(steps=20):
    train_reward_model()
    draw = random.Random(0)
    rows = [
        {"prompt": f"May I have the {good} ?", "completion": draw.choice([KIND, RUDE]).format(good)}
        for good in GOODS * 8
    ]
    config = Config.from_recipe(
        env="gspo/Dataset-v0",
        env_kwargs={"data": rows, "rewards": [FOLDER], "held_out": 0},
        steps=steps,
        tasks_per_step=8,
        eval_tasks=16,
        recipe={"hidden_size": 64, "demonstrations": 64, "imitation_steps": 60},
    )
    history = GSPOAgent(config=config).train()
    means = [metrics["eval/return"] for _, metrics in history if "eval/return" in metrics]
    print(f"score of the reward model: {means[0]:.2f} -> {means[-1]:.2f}")
    return means


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
