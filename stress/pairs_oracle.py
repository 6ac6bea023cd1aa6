"""A reference in float64 for what a run has computed, from the equations and the kept files alone.

It reads the kept episodes, the checkpoints and the settings of a run of `pairs.py` and works out
advantages, log-probabilities, losses, gradients and weights again: one padded batch of whole
sequences, plain loops, no code of `gspo_env.credit`, `batch` or `learner`. Notation and equations
are those of docs/credit.md and of the docstrings of the estimators and losses.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pairs_envs
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.func import functional_call
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from gspo_env import make_env
from gspo_env.env.base import Action
from gspo_env.episodes import read_episodes

TINY = 1e-8
SLACK = {"float32": 1.0, "auto": 1.0, "bfloat16": 1500.0, "float16": 150.0}
"""What the bounds of float32 are multiplied by for weights of other dtypes."""


class Run:
    """A finished run, and what was wrong with it."""

    def __init__(self, folder: Path, start: Path, teacher: Path) -> None:
        self.folder, self.faults = folder, []
        self.settings = tomllib.loads((folder / "config.toml").read_text())
        self.slack = SLACK[self.settings["model_dtype"]]
        self.temperature = self.settings["rollout"]["temperature"]
        self.engine_bound = 1e-4 * self.slack
        if self.settings["engine"]["name"].startswith("vllm"):
            self.engine_bound = 1e-3 if self.slack == 1 else 0.3
        self.model = AutoModelForCausalLM.from_pretrained(start, attn_implementation="eager")
        self.model = self.model.double().requires_grad_(False)
        self.start = self._rounded({n: p.detach() for n, p in self.model.named_parameters()})
        self.teacher = load_file(teacher / "model.safetensors")
        self.tokenizer = AutoTokenizer.from_pretrained(start)
        self.coefficient = self.settings["learner"]["entropy_coef"]
        self.is_known = True
        """Whether the optimiser's state follows from the gradients."""
        self.low = not self.settings["learner"]["entropy_target"]
        """Whether the mean entropy of the last step was low enough for the bonus."""
        self.moments: dict[str, tuple[Tensor, Tensor]] = {}
        self.updates = 0
        self.notes = json.loads((folder / "notes.json").read_text())
        """The episodes of each minibatch of each step, and the advantages in float64."""
        self.steps = max(int(p.name[5:]) for p in (folder / "checkpoints").glob("step-*"))
        self.losses = [
            json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()
        ]

    def fault(self, what: str, got: Any, want: Any, bound: float) -> None:
        """Notes a difference above a bound."""
        got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
        if got.shape != want.shape:
            self.faults.append(f"{what}: shape {got.shape}, expected {want.shape}")
        elif got.size and not (worst := float(np.abs(got - want).max())) <= bound:
            at = np.unravel_index(np.abs(got - want).argmax(), got.shape)
            self.faults.append(
                f"{what}: {got[at]:.9g}, expected {want[at]:.9g} (differs by {worst:.2g})"
            )

    def check(self) -> list[str]:
        """Checks every step; returns what is wrong."""
        records = read_episodes(self.folder, phases=("train", "eval"))
        for record in records:
            self._check_play(record)
        self._check_groups([r for r in records if r.phase == "train"])
        self._check_engine(records)
        for step in range(1, self.steps + 1):
            kept = dict(self.moments), self.updates, self.coefficient, self.low
            self._check_step(step, [r for r in records if (r.phase, r.step) == ("train", step)])
            if self._metrics(step).get("train/undone_updates"):
                self.moments, self.updates, self.coefficient, self.low = kept
        self._check_model()
        return self.faults

    def _check_model(self) -> None:
        """Compares the saved model with the last weights, the adapter added once."""
        saved = load_file(self.folder / "model/model.safetensors")
        whole = self._whole(self._rounded(self.weights(self.steps)))
        for name, want in whole.items():
            bound = 1e-6 if self.slack == 1 else 0.01 * float(want.abs().max())
            self.fault(f"the saved {name}", saved[name].double(), want, bound)

    # -- what was played -------------------------------------------------------------------------

    def _check_play(self, record: Any) -> None:
        """Plays the texts of an episode again, in its environment."""
        env = environment(record)
        if env is None or record.error:
            return
        where = f"{record.episode}"
        observation, _ = env.reset(seed=record.seed, options=json.loads(record.options or "{}"))
        ended = False
        for turn in record.turns:
            if turn.kind == "summary":
                continue
            if turn.observation != observation:
                self.faults.append(
                    f"{where} turn {turn.turn}: the observation is {turn.observation!r}, expected "
                    f"{observation!r}"
                )
            text = self.tokenizer.decode(turn.prompt_ids)
            if observation not in text and turn.parent != (turn.turn - 1 if turn.turn else None):
                pass  # a conversation of the environment's own
            elif observation not in text:
                self.faults.append(
                    f"{where} turn {turn.turn}: {observation!r} is not in its prompt"
                )
            last = turn is record.turns[-1]
            if last and record.stop_reason == "max_turn_tokens":
                reward = 0.0
            else:
                action = Action(turn.action, turn.action_ids)
                observation, reward, done, cut, _ = env.step(action)
                ended = done or cut
            if kind(record) == "Judged":
                reward += 0.05 * pairs_envs.worth(turn.action)
            if kind(record) == "Ranked" and last:
                continue  # see `_check_groups`
            self.fault(f"{where} turn {turn.turn} reward", turn.reward, reward, 1e-12)
        if ended != (record.stop_reason in ("terminated", "truncated")):
            self.faults.append(f"{where}: it ended with {record.stop_reason}")

    def _check_groups(self, records: Sequence[Any]) -> None:
        """Works out the rewards of groups again."""
        for rows in by_group(records):
            if kind(rows[0]) == "Ranked":
                best = max((len(r.turns[-1].action) for r in rows if r.turns), default=0)
                for r in rows:
                    if r.turns and not r.error:
                        last = r.turns[-1]
                        cut = r.stop_reason == "max_turn_tokens"
                        want = 0.0 if cut else pairs_envs.pay(last.action)
                        want += len(last.action) == best
                        self.fault(f"{r.episode} group reward", last.reward, want, 1e-12)
            elif kind(rows[0]) == "Dataset":
                self._check_ratings([r for r in rows if r.turns and not r.error])

    def _check_ratings(self, records: Sequence[Any]) -> None:
        """Works out the rewards of the dataset's functions, judges and reward model again."""
        specs = self.settings["env_kwargs"]["rewards"]
        marks = [pairs_envs.worth(r.turns[-1].action) for r in records]
        for r, mark in zip(records, marks, strict=True):
            observation, answer = r.turns[0].observation, r.turns[-1].action
            want = pairs_envs.pay(answer) + (observation.split()[1] in answer)
            others = [0.5 * (m == mark) + (m < mark) for m in marks]
            if "rater" in specs:
                want += self._rate(observation, answer)
            elif len(records) > 1 and not isinstance(specs, str):
                want += (len(specs) - 1) * (sum(others) - 0.5) / (len(records) - 1)
            self.fault(f"{r.episode} rating", r.turns[-1].reward, want, 1e-6)

    def _rate(self, *texts: str) -> float:
        """Returns the score of the reward model for a conversation."""
        rater = AutoModelForSequenceClassification.from_pretrained(
            self.folder.parent / "rater", attn_implementation="eager"
        )
        messages = [
            {"role": r, "content": t} for r, t in zip(("user", "assistant"), texts, strict=True)
        ]
        text = self.tokenizer.apply_chat_template(messages, tokenize=False)
        ids = self.tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        with torch.no_grad():
            return float(rater.double()(input_ids=ids).logits[0, 0])

    # -- log-probabilities -----------------------------------------------------------------------

    def weights(self, step: int) -> dict[str, Tensor]:
        """Returns the leaves that train at a step, by the names of the model or its adapter."""
        folder = self.folder / f"checkpoints/step-{step:06d}"
        named = {k: v for f in folder.glob("state-*") for k, v in load_file(f).items()}
        return {k.removeprefix("weights."): v for k, v in named.items() if k.startswith("weights.")}

    def _rounded(self, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        dtype = self.settings["model_dtype"]
        dtype = torch.float32 if dtype == "auto" else getattr(torch, dtype)
        return {n: w.to(dtype).double() for n, w in named.items()}

    def _whole(self, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the weights of the model: the leaves, or the start with the adapter added."""
        settings = self.settings["learner"]
        if not settings["lora_rank"]:
            return dict(leaves)
        factor = (settings["lora_alpha"] or 2 * settings["lora_rank"]) / settings["lora_rank"]
        whole = dict(self.start)
        for name, down in leaves.items():
            if ".lora_A." in name:
                plain = name.removeprefix("base_model.model.").replace(".lora_A.default", "")
                up = leaves[name.replace("lora_A", "lora_B")]
                whole[plain] = whole[plain] + factor * (up @ down)
        return whole

    def logprobs(
        self, leaves: Mapping[str, Tensor], rows: Sequence[Sequence[int]], entropy: bool = False
    ) -> list[Tensor]:
        """Returns the log-probability of each token of sequences but the first, in one batch.

        If `entropy`, it is the entropy of the distribution of each token.
        """
        longest = max(map(len, rows))
        ids = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
        arguments = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
        logits = functional_call(self.model, dict(leaves), (), arguments).logits
        all_lp = (logits[:, :-1].double() / self.temperature).log_softmax(-1)
        lp = all_lp.gather(-1, ids[:, 1:, None])[..., 0]
        lp = -(all_lp.exp() * all_lp).sum(-1) if entropy else lp
        return [lp[n, : len(row) - 1] for n, row in enumerate(rows)]

    def sampled(
        self, leaves: Mapping[str, Tensor], records: Sequence[Any], entropy: bool = False
    ) -> list[list[Tensor]]:
        """Returns the log-probability (or entropy) of each sampled token by episode and turn."""
        contexts = [context(r, k) for r in records for k in range(len(r.turns))]
        if not contexts:
            return [[] for _ in records]
        flat = iter(
            lp[len(lp) - n :] if n else lp[:0]
            for lp, n in zip(
                self.logprobs(leaves, [c for c, _ in contexts], entropy),
                [n for _, n in contexts],
                strict=True,
            )
        )
        return [[next(flat) for _ in r.turns] for r in records]

    def _check_engine(self, records: Sequence[Any]) -> None:
        """Compares the engine's log-probabilities with those of the weights that it had."""
        versions: dict[int, list[tuple[Any, int, list[int]]]] = defaultdict(list)
        for r in records:
            for k, t in enumerate(r.turns):
                each = t.token_versions or [t.weights_version] * len(t.action_ids)
                for version in set(each):
                    versions[version].append(
                        (r, k, [n for n, v in enumerate(each) if v == version])
                    )
        for version, parts in versions.items():
            leaves = self._whole(self._rounded(self.weights(version)))
            with torch.no_grad():
                rows = [context(r, k) for r, k, _ in parts]
                values = self.logprobs(leaves, [ids for ids, _ in rows])
            for (r, k, places), (_, count), lp in zip(parts, rows, values, strict=True):
                got = np.array(r.turns[k].engine_logprobs)[places]
                want = lp[len(lp) - count :].numpy()[places]
                what = f"{r.episode} turn {k} engine log-probability"
                self.fault(what, got, want, self.engine_bound)

    # -- one update ------------------------------------------------------------------------------

    def _check_step(self, step: int, records: Sequence[Any]) -> None:
        before = self._rounded(self.weights(step - 1))
        with torch.no_grad():
            old = self.sampled(self._whole(before), records)
        credit = Credit(self, step, records, before)
        trained = [r for r in records if r.turns and not r.error]
        if not self.settings["credit"]["train_on_truncated"]:
            trained = [r for r in trained if not r.truncated]
        numbers = {id(r): n for n, r in enumerate(records)}
        known = True
        noted = [row for group in self.notes["advantages"][step - 1] for row in group]
        for r, own in zip(records, noted, strict=True):
            rows, masks = credit.tokens(r)
            known = known and rows is not None
            if (bare := credit.rows[r.episode]) is not None:
                lengths = [len(t.action_ids) for t in r.turns]
                values = np.repeat(own, lengths) if len(own) == len(r.turns) else own
                bound = 1e-9 if credit.name != "distillation" else credit.bound
                self.fault(
                    f"{r.episode} advantages", values, [a for row in bare for a in row], bound
                )
                if self.slack > 1 and credit.name == "distillation":  # they are data for the loss
                    cuts = np.cumsum(lengths)[:-1]
                    credit.rows[r.episode] = list(np.split(np.array(values, float), cuts))
            if r not in trained:
                if any(t.advantages is not None for t in r.turns):
                    self.faults.append(f"{r.episode} was trained on, and must not be")
                continue
            for k, t in enumerate(r.turns):
                where = f"{r.episode} turn {k}"
                keep = np.array(masks[k], bool)
                if not keep.any():
                    if any(a is not None for a in t.advantages or ()):
                        self.faults.append(f"{where} is masked, and was trained on")
                    continue
                if t.advantages is None:
                    self.faults.append(f"{where} was not trained on")
                    continue
                got = np.array([a is not None for a in t.advantages])
                if not np.array_equal(got, keep):
                    self.faults.append(f"{where}: trained tokens {got}, expected {keep}")
                    continue
                if rows is not None:
                    scale = max(1.0, float(np.abs(rows[k]).max(initial=0)))
                    bound = credit.bound * scale
                    self.fault(
                        f"{where} advantage",
                        np.array(t.advantages, float)[keep],
                        rows[k][keep],
                        bound,
                    )
                if t.trainer_logprobs is None:
                    continue  # the loss has no pass for pi_old
                got = np.array(t.trainer_logprobs, float)[keep]
                want = old[numbers[id(r)]][k].numpy()[keep]
                self.fault(f"{where} trainer log-probability", got, want, 1e-4 * self.slack)
        # in half precision, noise decides which of the engine's ratios the clip blocks
        noisy = self.slack > 1 and self.settings["loss"]["old_logprobs"] == "engine"
        # and which tokens have the highest entropy
        noisy = noisy or (self.slack > 1 and self.settings["learner"]["entropy_share"] < 1)
        if known and trained and not noisy:
            self._update(step, trained, [old[numbers[id(r)]] for r in trained], credit)

    def _update(self, step: int, trained: Sequence[Any], old: Any, credit: Credit) -> None:
        """Takes the optimiser steps of an update and compares the means and the weights."""
        masters = {n: w.double() for n, w in self.weights(step - 1).items()}
        settings = self.settings["learner"]
        parts = self.notes["minibatches"][step - 1]
        if parts is None or not self.is_known:
            return
        if len(numbers := [n for part in parts for n in part]) != len(set(numbers)):
            self.faults.append(f"step {step}: an episode is in two minibatches, {parts}")
            return
        if max(numbers) >= len(trained):
            self.faults.append(
                f"step {step}: the minibatches have {len(numbers)} episodes: {parts}"
            )
            return
        self.kl: list[float] = []
        losses, norms, imitations = [], [], []
        for part in parts:
            leaves = {n: w.requires_grad_() for n, w in masters.items()}
            rounded = {n: w + (self._rounded({n: w})[n] - w).detach() for n, w in leaves.items()}
            own = [trained[n] for n in part]
            chosen, count = self._choose(step, own, credit)
            loss, observed = self._loss(step, rounded, own, [old[n] for n in part], credit, chosen)
            bonus = self._bonus(rounded, own, chosen, count)
            imitation = self._imitation(step, rounded)
            total = loss + settings["observation_coef"] * observed - bonus
            (total + settings["imitation_coef"] * imitation).backward()
            imitations.append(float(imitation))
            gradients = {n: w.grad for n, w in leaves.items() if w.grad is not None}
            norm = math.sqrt(sum(float((g**2).sum()) for g in gradients.values()))
            if norm < 1e-3 * self.settings["loss"].get("kl_coef", 0.0):
                # all advantages are 0, and rounding is the gradient: AdamW takes whole steps by it;
                # a weight of the entropy that adapts then gives the next minibatches a gradient
                self.is_known = not settings["entropy_target"] or part is parts[-1]
                self.updates += len(parts) - len(losses)
                return
            losses.append(float(loss))
            norms.append(norm)
            limit = settings["max_grad_norm"] or math.inf
            factor = min(1.0, limit / (norm + 1e-6))
            masters = self._adamw(
                {n: w.detach() for n, w in leaves.items()},
                {n: g * factor for n, g in gradients.items()},
            )
        metrics = self._metrics(step)
        bound = self.slack * (1e-4 if len(parts) == 1 else 2e-3)
        norm, loss = float(np.mean(norms)), float(np.mean(losses))
        if self.kl and "train/kl" in metrics:
            kl = float(np.mean(self.kl))
            noise = (1e-5 * self.slack) ** 2  # of the estimate, by that of a token in two models
            slack = self.slack * (0.05 * kl + 1e-10) + noise
            self.fault(f"step {step} KL", metrics["train/kl"], kl, slack)
        imitated = metrics.get("train/imitation_loss", 0.0)
        self.fault(f"step {step} imitation", imitated, float(np.mean(imitations)), bound * 10)
        # the parts of a loss cancel each other: its rounding is that of their size
        size = max(credit.size, abs(loss))
        self.fault(f"step {step} loss", metrics["train/loss"], loss, bound * max(size, 1e-3))
        if credit.name == "distillation":  # the gradient has the noise of its advantages
            bound += credit.bound / max(credit.size, TINY)
        self.fault(
            f"step {step} gradient norm",
            metrics["train/grad_norm"],
            norm,
            bound * max(norm, 1e-4 * size)
            + self.slack * 5e-5 * self.settings["loss"].get("kl_coef", 0.0),
        )
        after = self.weights(step)
        first = self.weights(step - 1)
        if metrics.get("train/undone_updates"):
            masters = first
        moved = math.sqrt(sum(float(((masters[n] - first[n]) ** 2).sum()) for n in masters))
        off = math.sqrt(sum(float(((masters[n] - after[n]) ** 2).sum()) for n in masters))
        if off > 0.05 * self.slack**0.5 * moved + 1e-6:
            self.faults.append(f"step {step}: the weights are off by {off:.3g} after {moved:.3g}")

    def _metrics(self, step: int) -> dict[str, float]:
        lines = [line["metrics"] for line in self.losses if line["step"] == step]
        return {name: value for metrics in lines for name, value in metrics.items()}

    def _imitation(self, step: int, leaves: Mapping[str, Tensor]) -> Tensor:
        """Returns the mean negative log-probability of the tokens that an update imitates."""
        file = self.folder / f"checkpoints/step-{step:06d}/state.json"
        state = json.loads(file.read_text())["interleaved"] or {"episodes": []}
        rows = [sequence for episode in state["episodes"] for sequence in episode]
        values = self.logprobs(self._whole(leaves), [ids for ids, _ in rows]) if rows else []
        picked = [
            lp[torch.tensor(turns[1:]) >= 0] for lp, (_, turns) in zip(values, rows, strict=True)
        ]
        return -torch.cat(picked).mean() if picked else torch.zeros((), dtype=torch.float64)

    def _adamw(
        self, masters: dict[str, Tensor], gradients: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        settings, total = (
            self.settings["learner"],
            self.settings["steps"] * self.settings["learner"]["minibatches"],
        )
        at, warm = self.updates, settings["warmup_steps"]
        rest = max(0.0, (total - at) / max(1, total - warm))
        factor = {"constant": 1.0, "linear": rest, "cosine": (1 - math.cos(math.pi * rest)) / 2}[
            settings["schedule"]
        ]
        rate = settings["learning_rate"] * ((at + 1) / warm if at < warm else factor)
        self.updates += 1
        after = {}
        for name, w in masters.items():
            g = gradients.get(name, torch.zeros_like(w))
            m, v = self.moments.get(name, (torch.zeros_like(w), torch.zeros_like(w)))
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
            self.moments[name] = m, v
            decays = w.ndim > 1 and "embed_tokens" not in name
            w = w * (1 - rate * settings["weight_decay"] * decays)
            mean, square = m / (1 - 0.9**self.updates), v / (1 - 0.999**self.updates)
            after[name] = w - rate * mean / (square.sqrt() + 1e-8)
        return after

    def _check_ratios(
        self, r: Any, settings: Any, lp: Tensor, own: Tensor, engine: Tensor, turn: Any, keep: Any
    ) -> None:
        """Compares the ratios of a minibatch with those that were kept."""
        kept = [x for t in r.turns for x in t.ratios or [None] * len(t.action_ids)]
        before = engine if settings["old_logprobs"] == "engine" else own
        want = ratios(settings, (lp - before).clamp(-20, 20), turn)
        for got, each in zip(np.array(kept, object)[keep.numpy()], want.tolist(), strict=True):
            if got is None or abs(got - each) > (1e-4 + 0.3 * abs(each - 1)) * self.slack:
                self.faults.append(f"{r.episode}: a ratio is {got}, expected {each:.6g}")
                return

    def _choose(
        self, step: int, records: Sequence[Any], credit: Credit
    ) -> tuple[list[Tensor], int]:
        """Returns which sampled tokens of each episode are trained, and how many they are."""
        masks = [np.concatenate(credit.tokens(r)[1] or [[]]).astype(bool) for r in records]
        chosen = [torch.from_numpy(mask) for mask in masks]
        share = self.settings["learner"]["entropy_share"]
        if share < 1:
            with torch.no_grad():
                before = self._whole(self._rounded(self.weights(step - 1)))
                found = self.sampled(before, records, entropy=True)
            rows = [torch.cat(row) if row else torch.zeros(0).double() for row in found]
            pool = torch.cat([h[c] for h, c in zip(rows, chosen, strict=True)])
            floor = float(pool.quantile(1 - share)) - 1e-5
            chosen = [c & (h >= floor) for h, c in zip(rows, chosen, strict=True)]
        return chosen, sum(int(c.sum()) for c in chosen)

    def _bonus(
        self, leaves: Mapping[str, Tensor], records: Sequence[Any], chosen: Any, count: int
    ) -> Tensor:
        """Returns the weighted mean entropy of a minibatch; the weight of the next one adapts."""
        target = self.settings["learner"]["entropy_target"]
        if not self.coefficient and not target:
            return torch.zeros(())
        rows = self.sampled(self._whole(leaves), records, entropy=True)
        mean = sum(torch.cat(h)[c].sum() for h, c in zip(rows, chosen, strict=True)) / count
        bonus = self.coefficient * mean * self.low
        if target:
            self.low = float(mean) <= target
            self.coefficient = min(max(self.coefficient + (0.005 if self.low else -0.005), 0), 1)
        return bonus

    def _loss(
        self, step: int, leaves: Mapping[str, Tensor], records: Sequence[Any], old: Any,
        credit: Any, chosen: Any,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Returns the loss of a minibatch, and its observation loss."""
        settings = self.settings["loss"]
        whole = self._whole(leaves)
        new = self.sampled(whole, records)
        with torch.no_grad():
            needed = settings.get("kl_coef", 0)
            reference = self.sampled(self.start, records) if needed else new
        counts = [sum(int(np.sum(m)) for m in credit.tokens(r)[1]) for r in records]
        episodes, tokens = sum(c > 0 for c in counts), sum(counts)
        total = torch.zeros((), dtype=torch.float64)
        for i, r in enumerate(records):
            if not counts[i]:
                continue
            rows, masks = credit.tokens(r)
            keep = torch.from_numpy(np.concatenate([np.array(m, bool) for m in masks]))
            lp, own = torch.cat(new[i])[keep], torch.cat(list(old[i]))[keep]
            ref = torch.cat(reference[i])[keep]
            engine = torch.tensor([p for t in r.turns for p in t.engine_logprobs]).double()[keep]
            turn = torch.tensor([k for k, t in enumerate(r.turns) for _ in t.action_ids])[keep]
            advantage = torch.from_numpy(np.concatenate(rows))[keep] * chosen[i][keep]
            values = objective(
                settings,
                self.settings["supply"]["max_staleness"],
                lp,
                own,
                engine,
                ref,
                advantage,
                turn,
                torch.tensor(ages_of(r, step - 1))[keep],
            )
            if settings.get("kl_coef"):
                log_q = (ref - lp).detach()
                self.kl += (log_q.expm1() - log_q).tolist()
            self._check_ratios(r, settings, lp.detach(), own, engine, turn, keep)
            same = (turn[:, None] == turn).sum(1)
            weight = {
                "sequence_mean": 1 / counts[i] / episodes,
                "turn_mean": 1 / same / len(set(turn.tolist())) / episodes,
                "token_mean": 1 / tokens,
                "token_sum": 1 / settings["max_tokens"] / episodes,
            }[settings["aggregation"]]
            total = total - (weight * values).sum()
        observed = torch.zeros((), dtype=torch.float64)
        if self.settings["learner"]["observation_coef"]:
            sequences = [
                s
                for r, c in zip(records, counts, strict=True)
                if c
                for s in sequences_of(r, credit.tokens(r)[1])
            ]
            values = self.logprobs(whole, [ids for ids, _, _ in sequences])
            for (_, seen, _), lp in zip(sequences, values, strict=True):
                if any(seen):
                    observed = observed - lp[torch.tensor(seen[1:])].mean() / len(sequences)
        return total, observed


def ratios(settings: Mapping[str, Any], log_r: Tensor, turn: Tensor) -> Tensor:
    """Returns the ratio of each token of an episode."""
    level, power = settings.get("ratio_level", "token"), settings.get("ratio_mean", 0.0)
    s = torch.empty_like(log_r)
    for t in range(len(log_r)):
        token = torch.arange(len(turn)) == t
        same = {"sequence": turn >= 0, "turn": turn == turn[t], "token": token}
        part = log_r[same[level]]
        s[t] = (part * power).exp().mean() ** (1 / power) if power else part.mean().exp()
    return s


def objective(
    settings: Mapping[str, Any], staleness: int, lp: Tensor, own: Tensor, engine: Tensor,
    ref: Tensor, advantage: Tensor, turn: Tensor, age: Tensor,
) -> Tensor:  # fmt: skip
    """Returns the objective of each token of one episode, with its gradient."""
    name = settings["name"]
    before = engine if settings["old_logprobs"] == "engine" else own
    log_r = (lp.detach() - before).clamp(-20, 20)
    carrier = (lp - lp.detach()).exp()
    if name in ("sapo", "cispo", "vespo"):
        r = log_r.exp()
        positive = advantage > 0 if name == "sapo" else advantage >= 0
        if name == "sapo":
            tau = torch.where(positive, settings["tau_pos"], settings["tau_neg"])
            g = 1 / (1 + (-tau * (r - 1)).exp())
            weight = 4 * g * (1 - g) * r
        elif name == "cispo":
            weight = r.clamp(max=settings["cap"])
        else:
            product = log_r.sum().clamp(math.log(1e-8), 20).exp()
            k = torch.where(positive, settings["k_pos"], settings["k_neg"])
            decay = torch.where(positive, settings["lambda_pos"], settings["lambda_neg"])
            weight = product**k * (decay * (1 - product)).exp()
        return weight * advantage * carrier
    power = settings["ratio_mean"]
    s = ratios(settings, log_r, turn)
    factor = s ** (1 - power) * (power * log_r).exp()
    wider, dual = (1.0 + age) ** settings["clip_staleness"], settings["dual_clip"]
    low, high = 1 - wider * settings["clip_low"], 1 + wider * settings["clip_high"]
    positives = settings["positives"]
    if positives == "unweighted":
        factor = torch.where(advantage > 0, 1.0, factor)
    values = factor * carrier * advantage
    over = (s > high) & (positives == "clipped")
    clipped = torch.where(advantage > 0, over, (s < low) & (advantage < 0))
    values = torch.where(clipped, s.clamp(low, high) * advantage, values)
    if dual:
        values = torch.where((advantage < 0) & (s > dual), dual * advantage, values)
    rho = (own - engine).clamp(-20, 20).exp()
    correction = settings["correction"]
    if correction == "auto":
        correction = "truncated" if staleness and settings["old_logprobs"] == "trainer" else "none"
    if name == "icepop":
        inside = (rho >= settings["mask_low"]) & (rho <= settings["mask_high"])
        values = values * torch.where(inside, rho, 0.0)
    elif correction == "truncated":
        values = values * rho.clamp(max=settings["correction_cap"])
    elif correction == "mask":
        mean, cap = float((own - engine).mean()), math.log(settings["correction_cap"])
        values = values * float(abs(mean) <= cap)
    log_q = (ref - lp).clamp(-20, 20)
    return values - settings["kl_coef"] * (log_q.exp() - 1 - log_q)


def ages_of(record: Any, version: int) -> list[int]:
    """Returns how many updates ago each token was sampled."""
    return [
        version - v
        for t in record.turns
        for v in t.token_versions or [t.weights_version] * len(t.action_ids)
    ]


# -- contexts ------------------------------------------------------------------------------------


def context(record: Any, k: int) -> tuple[list[int], int]:
    """Returns the tokens up to the end of a turn's action, and how many the action has."""
    ids: list[int] = []
    at: int | None = k
    while at is not None:
        turn = record.turns[at]
        ids = [*turn.prompt_ids, *turn.action_ids, *ids]
        at = turn.parent
    return ids, len(record.turns[k].action_ids)


def sequences_of(record: Any, masks: Any) -> Iterator[tuple[list[int], list[bool], int]]:
    """Yields the sequences of an episode that are trained: ids, observed tokens, trained tokens."""
    parents = {turn.parent for turn in record.turns}
    taken: set[int] = set()
    for leaf in (k for k in range(len(record.turns)) if k not in parents):
        path: list[int] = []
        at: int | None = leaf
        while at is not None:
            path.insert(0, at)
            at = record.turns[at].parent
        ids, seen, trained, begun = [], [], 0, False
        for k in path:
            turn = record.turns[k]
            ids += turn.prompt_ids
            seen += [begun] * len(turn.prompt_ids)
            ids += turn.action_ids
            seen += [False] * len(turn.action_ids)
            if k not in taken:
                begun = begun or bool(turn.action_ids)
                trained += int(np.sum(masks[k]))
        taken.update(path)
        if trained:
            yield ids, seen, trained


def by_group(records: Sequence[Any]) -> list[list[Any]]:
    """Returns the episodes of each group."""
    groups: dict[str, list[Any]] = defaultdict(list)
    for record in records:
        groups[record.group].append(record)
    return list(groups.values())


def kind(record: Any) -> str:
    """Returns the class of an episode's environment."""
    name = record.env.removeprefix("custom/").removesuffix("-v0")
    return {"one": "Words", "two": "Final", "three": "Both"}.get(name, name)


def environment(record: Any) -> Any:
    """Returns the environment of an episode, if it is one of `pairs_envs`."""
    cls = getattr(pairs_envs, kind(record), None)
    return cls() if isinstance(cls, type) else None


# -- credit --------------------------------------------------------------------------------------


class Credit:
    """The advantages of the tokens of a step."""

    def __init__(self, run: Run, step: int, records: Sequence[Any], weights: Any) -> None:
        self.run, self.settings = run, run.settings["advantage"]
        self.name = self.settings["name"]
        self.bound = 1e-6
        if self.name == "distillation":  # sums of log-probabilities, each with its own noise
            terms = sum(self.settings["gamma"] ** (2 * k) for k in range(50))
            self.bound = 1e-4 * run.slack * math.sqrt(terms)
        file = run.folder / f"checkpoints/step-{step:06d}/state.json"
        self.scores = json.loads(file.read_text())["score"]
        self.rows: dict[str, list[np.ndarray] | None] = {}
        self.size = 1.0
        for group in by_group(records):
            played = [r for r in group if not r.error]
            used = [r for r in played if r.turns]
            values = [np.zeros(len(r.turns)) for r in used]
            if self.name == "distillation":
                values = (
                    self._distil(used, weights) if len(played) >= 2 or len(group) == 1 else values
                )
            elif len(used) >= 2 and len(played) >= 2:
                values = compare(self.settings, used, self._score(group[0].env))
            self.rows |= {r.episode: None for r in group}
            for r, row in zip(used, values, strict=True):
                self.rows[r.episode] = self._by_token(r, row)
            for r in group:
                if self.rows[r.episode] is None and r not in used:
                    self.rows[r.episode] = [np.zeros(len(t.action_ids)) for t in r.turns]
        self._scale(records)

    def _score(self, env: str) -> str:
        scores = self.scores.get("environments", {}).get(env, self.scores)
        return scores.get("score") or "turns"

    def _by_token(self, r: Any, row: Any) -> list[np.ndarray] | None:
        if row is None or np.isnan(row).any():
            return None
        lengths = [len(t.action_ids) for t in r.turns]
        if self.name == "distillation":
            return list(np.split(row, np.cumsum(lengths)[:-1]))
        return [np.full(n, a) for n, a in zip(lengths, row, strict=True)]

    def tokens(self, record: Any) -> tuple[list[np.ndarray] | None, list[list[bool]]]:
        """Returns the advantages of each turn's tokens, None if unknown, and which are trained."""
        rows, masks = self.rows[record.episode], []
        rows = None if rows is None else list(rows)
        for k, t in enumerate(record.turns):
            mask, own = self._given(record, k)
            masks.append([True] * len(t.action_ids) if mask is None else mask)
            if own is not None and rows is not None:
                rows[k] = np.array(own)
        return rows, masks

    def _given(self, record: Any, k: int) -> tuple[Any, Any]:
        """Returns the mask and the advantages that the environment gives a turn."""
        turn = record.turns[k]
        if kind(record) != "Masked" or turn.kind == "summary":
            return None, None
        if turn is record.turns[-1] and record.stop_reason == "max_turn_tokens":
            return None, None
        actions = sum(t.kind == "action" for t in record.turns[:k])
        return pairs_envs.token_credit(actions, turn.action_ids)

    def _pool(self, records: Sequence[Any]) -> np.ndarray:
        """Returns the advantages that reach the loss: of each turn, or of each token."""
        values: list[float] = []
        for r in records:
            rows = self.rows[r.episode]
            if r.error or not r.turns or rows is None:
                continue
            if not self.run.settings["credit"]["train_on_truncated"] and r.truncated:
                continue
            for k, row in enumerate(rows):
                mask, own = self._given(r, k)
                keep = np.ones(len(row), bool) if mask is None else np.array(mask)
                if own is not None or not len(row):
                    continue
                if self.name == "distillation":
                    values += row[keep].tolist()
                elif keep.any():
                    values.append(float(row[0]))
        return np.array(values) if values else np.zeros(1)

    def _scale(self, records: Sequence[Any]) -> None:
        is_batch, wanted = self.settings.get("scale") == "batch", self.run.settings["credit"]["rms"]
        unknown = [r for r in records if r.turns and not r.error and self.rows[r.episode] is None]
        if unknown and (is_batch or wanted):  # all advantages have a scale that is not known
            self.rows, self.size = dict.fromkeys(self.rows), wanted or 1.0
            return
        if is_batch:
            pool = self._pool(records)
            n = max(len(pool) - self.settings["ddof"], 1)
            std = math.sqrt(((pool - pool.mean()) ** 2).sum() / n)
            self._times(1 / std if std >= TINY else 0.0)
        rms = math.sqrt((self._pool(records) ** 2).mean())
        if self.name == "distillation" and wanted and TINY <= rms <= self.bound:  # noise, or not
            self.rows, self.size = dict.fromkeys(self.rows), wanted
            return
        if wanted and rms >= TINY:
            self._times(wanted / rms)
            rms = wanted
        self.size = rms

    def _times(self, factor: float) -> None:
        if self.name == "distillation":  # the noise of log-probabilities grows with the factor
            self.bound *= max(1.0, factor)
        self.rows = {
            key: None if rows is None else [row * factor for row in rows]
            for key, rows in self.rows.items()
        }

    def _distil(self, records: Sequence[Any], weights: Any) -> list[np.ndarray]:
        """Returns the log-ratio of the teacher and the policy of each token, and other credit."""
        settings, run = self.settings, self.run
        credit: Any = [np.zeros(len(r.turns)) for r in records]
        if settings["credit"] and len(records) >= 2:
            usual = {"scale": "none", "ddof": 0, "gamma": 1.0, "step_weight": 1.0}
            other = {"name": settings["estimator"], **usual}
            credit = compare(other, records, self._score(records[0].env))
        rows = []
        for r, values in zip(records, credit, strict=True):
            changed, leaves = r, run._whole(weights)
            if settings["hint"]:
                changed = Hinted(r, run.tokenizer)
            if settings["teacher"] != "self":
                leaves = {n: w.double() for n, w in run.teacher.items()}
            with torch.no_grad():
                teacher = [lp.numpy() for lp in run.sampled(leaves, [changed])[0]]
            ratio = []
            for k, (t, lp) in enumerate(zip(r.turns, teacher, strict=True)):
                each = lp - np.array(t.engine_logprobs)
                mask, _ = self._given(r, k)
                if mask is not None:
                    each = np.where(mask, each, 0.0)
                newest = max(max(x.token_versions or [x.weights_version]) for x in r.turns)
                if settings["turn_steps"] and k >= 1 + newest // settings["turn_steps"]:
                    each = 0 * each
                ratio += each.tolist()
            total, sums = 0.0, []
            for x in reversed(ratio):
                total = x + settings["gamma"] * total
                sums.append(total)
            spread = np.concatenate(
                [np.full(len(t.action_ids), v) for t, v in zip(r.turns, values, strict=True)]
            )
            rows.append(settings["weight"] * np.array(sums[::-1]) + settings["credit"] * spread)
        return rows


class Hinted:
    """An episode whose sequences begin with the hint in the system prompt."""

    def __init__(self, record: Any, tokenizer: Any) -> None:
        env = environment(record) or make_env(record.env)
        _, info = env.reset(seed=record.seed, options=json.loads(record.options or "{}"))
        first = (json.loads(record.messages or "null") or [{"role": "user"}])[0]
        system = first["content"] if first["role"] == "system" else ""
        self.turns = [HintedTurn(t, tokenizer, system, info["solution"]) for t in record.turns]


class HintedTurn:
    """A turn; where a sequence begins, its prompt has the hint."""

    def __init__(self, turn: Any, tokenizer: Any, system: str, hint: str) -> None:
        self.parent, self.action_ids = turn.parent, turn.action_ids
        self.prompt_ids = turn.prompt_ids
        if turn.parent is None:
            text, head = tokenizer.decode(turn.prompt_ids), "<|im_start|>system\n"
            if system:
                text = text.replace(head + system, f"{head}{system}\n\n{hint}", 1)
            elif text.startswith(head):
                text = text.replace(head, head + hint, 1)
            else:
                text = f"{head}{hint}<|im_end|>\n{text}"
            self.prompt_ids = tokenizer(text, add_special_tokens=False)["input_ids"]


def compare(settings: Mapping[str, Any], episodes: Sequence[Any], score: str) -> list[np.ndarray]:
    """Returns the advantages of the turns of one group, before the scale of the batch."""
    name, scale, ddof = settings["name"], settings["scale"], settings["ddof"]
    gamma = settings.get("gamma", 1.0)
    rewards = [rewards_of(r, score) for r in episodes]
    returns = [to_go(row, gamma) for row in rewards]
    least = min(3, len(episodes))
    n = len(episodes)

    def z(values: Any) -> np.ndarray:
        values = np.asarray(values, float)
        return divide([values - values.mean()], values - values.mean())[0]

    def divide(rows: Any, deviations: np.ndarray) -> list[np.ndarray]:
        std = math.sqrt((deviations**2).sum() / max(len(deviations) - ddof, 1))
        if std < TINY:
            return [np.zeros(len(row)) for row in rows]
        return [np.asarray(row) / (std if scale == "std" else 1.0) for row in rows]

    def z_by_turn(rows: Any) -> list[np.ndarray]:
        pooled = np.concatenate(rows)
        result = [np.zeros(len(row)) for row in rows]
        for k in range(max(map(len, rows))):
            have = [i for i in range(n) if len(rows[i]) > k]
            if len(have) >= least:
                values = z([rows[i][k] for i in have])
            else:
                others = [
                    np.concatenate([rows[j] for j in range(n) if j != i]).mean() for i in have
                ]
                row = [rows[i][k] - o for i, o in zip(have, others, strict=True)]
                values = divide([row], pooled - pooled.mean())[0]
            for i, value in zip(have, values, strict=True):
                result[i][k] = value
        return result

    def baseline(i: int, k: int) -> tuple[float, float]:
        have = [j for j in range(n) if len(returns[j]) > k]
        if len(have) >= least:
            at = [returns[j][k] for j in have]
            return (sum(at) - returns[i][k]) / (len(have) - 1), sum(at) / len(have)
        others = np.concatenate([returns[j] for j in range(n) if j != i])
        return float(others.mean()), float(np.concatenate(returns).mean())

    states: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for i, r in enumerate(episodes):
        for k, t in enumerate(r.turns):
            if t.state_key is not None:
                states[t.state_key].append((i, k))
    outcomes = np.array([r.outcome for r in episodes])
    if name == "outcome":
        centred = outcomes - outcomes.mean()
        factor = n / (n - 1) if settings["baseline"] == "leave_one_out" else 1.0
        result = divide(
            [np.full(len(r.turns), factor * c) for r, c in zip(episodes, centred, strict=True)],
            centred,
        )
    elif name == "turn_plus_outcome":
        own = z_by_turn([np.array([t.reward for t in r.turns]) for r in episodes])
        result = [a + settings["turn_weight"] * b for a, b in zip(z(outcomes), own, strict=True)]
    elif name == "returns_to_go":
        pairs = [[baseline(i, k) for k in range(len(returns[i]))] for i in range(n)]
        off = np.concatenate(
            [g - np.array([m for _, m in p]) for g, p in zip(returns, pairs, strict=True)]
        )
        result = divide(
            [g - np.array([b for b, _ in p]) for g, p in zip(returns, pairs, strict=True)], off
        )
    elif name == "gigpo":
        whole = z([row.sum() for row in rewards])
        result = [np.full(len(r.turns), w) for r, w in zip(episodes, whole, strict=True)]
        for visits in states.values():
            for (i, k), value in zip(visits, z([returns[i][k] for i, k in visits]), strict=True):
                result[i][k] += settings["step_weight"] * value
    elif name == "normalize_then_accumulate":
        if settings["per"] == "turn":
            rows = z_by_turn(rewards)
        else:
            rows = list(np.split(z(np.concatenate(rewards)), np.cumsum([*map(len, rewards)])[:-1]))
        result = [to_go(row, gamma) for row in rows]
        if settings["root"]:
            result = [row / np.sqrt(np.arange(len(row), 0, -1)) for row in result]
    elif name == "by_agent":
        paid = [json.loads(r.turns[-1].reward_parts or "{}") for r in episodes]
        turns = [(i, k, t) for i, r in enumerate(episodes) for k, t in enumerate(r.turns)]
        result = [np.zeros(len(r.turns)) for r in episodes]
        for i, k, turn in turns:
            role = (turn.state_key, agent_of(episodes[i], k))
            same = [(j, m) for j, m, t in turns if (t.state_key, agent_of(episodes[j], m)) == role]
            row = z([paid[j].get(role[1], settings["missing"]) for j, _ in same])
            result[i][k] = settings["weights"].get(role[1], 1.0) * row[same.index((i, k))]
    elif name == "parts":
        result = [np.zeros(len(r.turns)) for r in episodes]
        for part, weight in settings["weights"].items():
            values = [part_of(r, part, row) for r, row in zip(episodes, rewards, strict=True)]
            rated = [i for i in range(n) if values[i] is not None]
            own = {"scale": "std" if settings["normalize"] else "none", "ddof": ddof}
            own |= {"name": settings["estimator"], "gamma": 1.0, "step_weight": 1.0}
            shown = [with_rewards(episodes[i], values[i]) for i in rated]
            for i, row in zip(
                rated, compare(own, shown, "turns") if len(rated) > 1 else [], strict=False
            ):
                result[i] = result[i] + weight * row
    elif name == "group_gae":
        result = gae(settings, episodes, rewards, returns, states, baseline, score, least)
        pooled = np.concatenate(result)
        result = divide(result, pooled - pooled.mean())
    else:
        raise ValueError(f"the oracle does not know the estimator {name}")
    if scale == "mean":
        mean = outcomes.mean()
        result = [row / mean if mean >= TINY else 0 * row for row in result]
    return result


def gae(
    settings: Any, episodes: Any, rewards: Any, returns: Any, states: Any, baseline: Any,
    score: str, least: int,
) -> list[np.ndarray]:  # fmt: skip
    """Returns the generalised advantages of a group; NaN where the final state is not known."""
    rows = []
    for i, r in enumerate(episodes):
        values = []
        for k, t in enumerate(r.turns):
            visits = states.get(t.state_key, []) if t.state_key is not None else []
            value = baseline(i, k)[0]
            if len({j for j, _ in visits}) >= least:
                value = float(np.mean([returns[j][m] for j, m in visits if j != i]))
            values.append(value)
        after = 0.0
        if not r.terminated and score == "turns":
            key, env = None, environment(r)
            actions = [t for t in r.turns if t.kind == "action"]
            if env is None:
                after = math.nan
            elif actions and r.stop_reason != "max_turn_tokens":
                text = actions[-1].action
                text = text.replace("delta", "cedar") if kind(r) == "Long" else text
                key = pairs_envs.WORDS[pairs_envs.zlib.crc32(text.encode()) % 2]
            peers = [returns[j][m] for j, m in states.get(key, []) if j != i]
            peers = peers or [
                g[len(r.turns)] for j, g in enumerate(returns) if j != i and len(g) > len(r.turns)
            ]
            after = after + (float(np.mean(peers)) if peers else 0.0)
        following = [*values[1:], after]
        deltas = rewards[i] + settings["gamma"] * np.array(following) - np.array(values)
        rows.append(to_go(deltas, settings["gamma"] * settings["lam"]))
    return rows


def rewards_of(record: Any, score: str) -> np.ndarray:
    """Returns the rewards of the turns by a score."""
    values = np.array([0.0 if score == "outcome" else t.reward for t in record.turns])
    if score == "outcome" or (score == "sum" and record.own_outcome):
        values[-1] += record.outcome
    return values


def agent_of(record: Any, k: int) -> Any:
    """Returns the agent of a turn; after a summary it is that of the summary."""
    after = k > 0 and record.turns[k - 1].kind == "summary"
    return agent_of(record, k - 1) if after else record.turns[k].agent


def part_of(record: Any, part: str, rewards: Any) -> Any:
    """Returns the part of the reward of each turn; None if no turn has it."""
    if part == "reward":
        return rewards
    if part == "tokens":
        return [len(t.action_ids) for t in record.turns]
    parts = [json.loads(t.reward_parts or "{}") for t in record.turns]
    return [each.get(part, 0.0) for each in parts] if any(part in x for x in parts) else None


def with_rewards(record: Any, values: Any) -> Any:
    """Returns an episode whose turns have other rewards."""
    turns = [replace(t, reward=float(v)) for t, v in zip(record.turns, values, strict=True)]
    return replace(record, turns=turns, own_outcome=False)


def to_go(values: np.ndarray, gamma: float) -> np.ndarray:
    """Returns the discounted sum from each place on."""
    size = len(values)
    return np.array(
        [sum(gamma ** (m - k) * values[m] for m in range(k, size)) for k in range(size)]
    )
