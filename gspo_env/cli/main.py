"""The command line: train, evaluate, compare, envs, doctor."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import logging
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from gspo_env.errors import ConfigError, GspoEnvError

if TYPE_CHECKING:
    from gspo_env.config import Config
    from gspo_env.types import Group

_USAGE = """usage: gspo-env COMMAND [OPTIONS]

commands:
  train      train a policy with GSPO on a text environment
  evaluate   play held-out tasks with a trained folder, a hub model or a scripted agent
  compare    compare settings over paired seeds
  envs       list the environments
  doctor     check this machine and a model; --plan estimates the memory of a run

`gspo-env COMMAND --help` shows a command's options."""

_SHORT = {"--advantage": "--estimator"}


def main(argv: Sequence[str] | None = None) -> None:
    """Runs one command; bad input ends with one sentence and exit code 2."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    commands = {
        "train": train,
        "evaluate": evaluate,
        "compare": compare,
        "envs": envs,
        "doctor": doctor,
    }
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_USAGE)
        sys.exit(0 if arguments else 2)
    if arguments[0] not in commands:
        _fail(f"unknown command {arguments[0]!r}; expected one of: {', '.join(commands)}")
    logging.basicConfig(format="%(levelname)s %(message)s", level=logging.WARNING)
    try:
        commands[arguments[0]](arguments[1:])
    except GspoEnvError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        sys.exit(130)


def train(arguments: list[str]) -> None:
    """`gspo-env train`."""
    from gspo_env.config import read_toml
    from gspo_env.env.registration import load_agent

    file, rest = _take(arguments, "--config")
    config = _config(read_toml(file) if file else {}, rest, "gspo-env train")
    load_agent("gspo")(config=config).train()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Evaluate:
    """Plays held-out tasks and prints success with a 95 % interval."""

    model: str = ""
    """A trained folder, a hub id, or `scripted`."""
    env: str = ""
    """Environment; a trained folder's own by default."""
    tasks: int = 256
    """Held-out tasks."""
    samples: int = 1
    """Episodes of each task, for pass@k and pass^k."""
    seed: int = 0


def evaluate(arguments: list[str]) -> None:
    """`gspo-env evaluate`."""
    from gspo_env.env.registration import load_agent

    options = _parse(_Evaluate, arguments, "gspo-env evaluate")
    if options.tasks < 1 or options.samples < 1:
        raise ConfigError("tasks and samples have to be at least 1")
    if not options.model:
        raise ConfigError("no model given; expected --model with a folder, a hub id or 'scripted'")
    if options.model == "scripted":
        agent = load_agent("scripted")(options.env or "gspo/Lookup-v0")
    else:
        agent = load_agent("gspo").load(options.model, options.env)
    _print_scores(agent.evaluate(options.tasks, options.samples))


_COMPARE = """usage: gspo-env compare [OPTIONS] [--config FILE] [options of `gspo-env train`]

  --arm NAME=VALUE,VALUE...  an axis of the grid: a config field and its values; repeat for more
  --seeds N                  paired seeds (default 5)
  --metric NAME              what is compared (default eval/success); train/... has every step
  --target VALUE             also count the episodes until the metric reaches this
  --match-rms                scale every arm's advantages to a root mean square of 1
  --workers N                processes (default: one for each core)
  --output DIR               results; the same folder again goes on where it stopped

A file's [compare] table holds the same: seeds, metric, target, match_rms, workers; [compare.grid]
lists of values; [compare.arms.NAME] further arms; [compare.problems.NAME] changes to the config,
for each problem that the arms are compared on."""


def compare(arguments: list[str]) -> None:
    """`gspo-env compare`."""
    from pathlib import Path

    from gspo_env.compare import compare as run
    from gspo_env.compare import parse
    from gspo_env.config import read_toml
    from gspo_env.report.comparison import write_report

    if any(flag in arguments for flag in ("-h", "--help")):
        print(_COMPARE)
        return
    own: dict[str, str] = {}
    for name in ("seeds", "metric", "target", "workers", "output"):
        own[name], arguments = _take(arguments, f"--{name}")
    axes: list[str] = []
    while any(a.partition("=")[0] == "--arm" for a in arguments):
        axis, arguments = _take(arguments, "--arm")
        axes.append(axis)
    if "--match-rms" in arguments:
        own["match_rms"] = "true"
        arguments = [a for a in arguments if a != "--match-rms"]
    file, rest = _take(arguments, "--config")
    tree = read_toml(file) if file else {}
    table = tree.pop("compare", {})
    comparison = parse(table, axes, own, _config(tree, rest, "gspo-env compare"))
    base = next(iter(comparison.problems.values()))
    folder = Path(own["output"] or base.output or "comparisons/comparison")
    run(
        comparison,
        folder,
        base.tracker,
        lambda line: print(line, flush=True),
        lambda results: write_report(comparison, results, folder),
    )
    print((folder / "tables.md").read_text())
    print(f"Page: {folder / 'report.html'}")


def envs(arguments: list[str]) -> None:
    """`gspo-env envs`."""
    from gspo_env.env.registration import describe_envs

    if arguments:
        _fail("`gspo-env envs` takes no options")
    for env in describe_envs():
        tools = f"  [tools: {', '.join(env.tools)}]" if env.tools else ""
        print(f"{env.id:24} {env.summary}{tools}")


def doctor(arguments: list[str]) -> None:
    """`gspo-env doctor`, and `gspo-env doctor --plan`."""
    from gspo_env.cli.doctor import diagnose

    if "--plan" in arguments:
        _plan([a for a in arguments if a != "--plan"])
        return
    if len(arguments) > 1 or (arguments and arguments[0].startswith("-")):
        _fail(
            "`gspo-env doctor` takes one optional argument, a model folder or hub id, or --plan "
            "with the options of `gspo-env train`"
        )
    findings = diagnose(arguments[0] if arguments else "")
    for finding in findings:
        print(f"{'ok ' if finding.ok else 'BAD'} {finding.name}: {finding.text}")
    if not all(finding.ok for finding in findings):
        sys.exit(1)


def _plan(arguments: list[str]) -> None:
    """What a run with these options needs."""
    from gspo_env.cli.memory import plan
    from gspo_env.config import read_toml

    file, rest = _take(arguments, "--config")
    found = plan(_config(read_toml(file) if file else {}, rest, "gspo-env doctor --plan"))
    for name in ("weights", "reference", "gradients", "optimizer", "activations"):
        print(f"{name:12} {getattr(found, name) / 2**20:10,.1f} MiB")
    print(
        f"{'update':12} {found.update / 2**20:10,.1f} MiB, microbatches of {found.tokens:,} tokens"
    )
    if found.cache:
        print(f"{'rollout':12} {found.cache / 2**20:10,.1f} MiB at most for keys and values")


def _config(tree: dict[str, Any], rest: list[str], program: str) -> Config:
    """The model's defaults, then the file's tree, then flags."""
    import tyro

    from gspo_env.config import Config, from_dict
    from gspo_env.registry import find
    from gspo_env.tracking.several import combine

    kwargs, rest = _pairs(rest, "--env-kwargs")
    engine_args, rest = _pairs(rest, "--engine-args")
    args, rest = _pairs(rest, "--estimator-args")
    rest = [_SHORT.get(a, a) for a in rest]
    model, _ = _take(rest, "--model")
    default = from_dict({**tree, "model": model} if model else tree)
    tracker, rest = _take(rest, "--tracker")
    if tracker:
        chosen = combine(tracker) if "," in tracker else find("tracker", tracker)
        default = dataclasses.replace(default, tracker=chosen())
    kind = Annotated[Config, tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes]
    fixed: Any = tyro.conf.configure(tyro.conf.FlagConversionOff)(kind)
    # what is free must not become flags: an environment may have arguments named as our fields
    closed = dataclasses.replace(
        default,
        env_kwargs={},
        vllm=dataclasses.replace(default.vllm, engine_args={}),
        advantage=dataclasses.replace(default.advantage, args={}),
    )
    config: Config = _parse(fixed, rest, program, closed)
    free = {**default.vllm.engine_args, **engine_args}
    return dataclasses.replace(
        config,
        env_kwargs={**default.env_kwargs, **kwargs},
        vllm=dataclasses.replace(config.vllm, engine_args=free),
        advantage=dataclasses.replace(config.advantage, args={**default.advantage.args, **args}),
    )


def _parse(kind: Any, arguments: list[str], program: str, *default: Any) -> Any:
    """`tyro.cli`, with its framed complaints as one sentence."""
    import tyro

    said = io.StringIO()
    keywords = {"default": default[0]} if default else {}
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(kind, args=arguments, prog=program, **keywords)
    except SystemExit as end:
        if not end.code:
            raise
    raise ConfigError(_sentence(said.getvalue()))


def _sentence(box: str) -> str:
    """The message inside a frame, with the options that it suggests."""
    lines = [line.strip(" │|╭╮╰╯") for line in box.splitlines()]
    rules = [not line.strip("─-") for line in lines]
    title = rules.index(False)
    start = rules.index(False, title + 1)
    end = rules.index(True, start)
    message = re.sub(r"^Error parsing (?!-)\S+ ", "", " ".join(lines[start:end]))
    near = [line.split()[0] for line in lines[end:] if re.match(r"--\w", line)]
    unknown = message.startswith("Unrecognized") and near
    return f"{message}; perhaps you meant {' or '.join(near)}" if unknown else message


def _take(arguments: list[str], name: str) -> tuple[str, list[str]]:
    """The value of an option, "" without it, and the other arguments."""
    for place, argument in enumerate(arguments):
        if argument.startswith(f"{name}="):
            return argument.partition("=")[2], arguments[:place] + arguments[place + 1 :]
        if argument == name:
            if place + 1 == len(arguments):
                raise ConfigError(f"{name} needs a value")
            return arguments[place + 1], arguments[:place] + arguments[place + 2 :]
    return "", arguments


def _pairs(arguments: list[str], name: str) -> tuple[dict[str, Any], list[str]]:
    if name not in arguments:
        return {}, arguments
    place = arguments.index(name)
    end = next(
        (n for n in range(place + 1, len(arguments)) if arguments[n].startswith("--")),
        len(arguments),
    )
    values: dict[str, Any] = {}
    for pair in arguments[place + 1 : end]:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"{name} got {pair!r}; expected key=value")
        try:
            values[key] = json.loads(value)
        except json.JSONDecodeError:
            values[key] = value
    return values, arguments[:place] + arguments[end:]


def _print_scores(groups: list[Group]) -> None:
    from gspo_env.compare.stats import pass_at_k, pass_hat_k, success_interval

    wins = [[bool(e.success) for e in group.episodes] for group in groups]
    episodes = [e for group in groups for e in group.episodes]
    low, high = success_interval(wins)
    size = len(wins[0])
    rate = sum(map(sum, wins)) / len(episodes)
    print(
        f"success  {rate:.1%}  (95 % interval {low:.1%} to {high:.1%}; {len(wins)} tasks x {size})"
    )
    print(f"return   {sum(float(e.rewards.sum()) for e in episodes) / len(episodes):.3f}")
    print(f"turns    {sum(len(e.turns) for e in episodes) / len(episodes):.2f}")
    for k in sorted({1, size} | {2**n for n in range(1, 10) if 2**n <= size}):
        at = sum(pass_at_k(size, sum(w), k) for w in wins) / len(wins)
        hat = sum(pass_hat_k(size, sum(w), k) for w in wins) / len(wins)
        print(f"pass@{k:<3} {at:.1%}   pass^{k:<3} {hat:.1%}")


def _fail(message: str) -> None:
    print(f"gspo-env: {message}", file=sys.stderr)
    sys.exit(2)
