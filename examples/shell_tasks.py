"""Writes 40 terminal tasks in Harbor's format: `python examples/shell_tasks.py shell-tasks`.

30 to train on and 10 held out, of five kinds, each drawn from its seed. `--base IMAGE` names the
image that their Dockerfiles begin with.
"""

import argparse
import json
import random
from pathlib import Path

TOML = """version = "1.0"
[metadata]
difficulty = "easy"
category = "shell"
[verifier]
timeout_sec = 60.0
[agent]
timeout_sec = 300.0
[environment]
cpus = 1
memory_mb = 256
storage_mb = 32
"""
TEST = """#!/bin/bash
mkdir -p /logs/verifier
reward=0
if [ "$({command})" = '{expected}' ]; then reward=1; fi
echo $reward >/logs/verifier/reward.txt
"""
NAMES = ("ada", "ben", "cleo", "dan", "eva", "finn", "gia", "hugo", "ida", "jon", "kim", "leo")


def count_files(rng):
    """Find and count files."""
    end = rng.choice(["log", "csv", "md"])
    paths = [f"{rng.choice('abc')}/{name}.{rng.choice(['log', 'csv', 'md'])}" for name in NAMES]
    text = f"Write the number of files below data whose names end with .{end} into answer.txt."
    solution = f"find data -name '*.{end}' | wc -l >answer.txt"
    count = sum(path.endswith(end) for path in paths)
    return dict.fromkeys(paths, "x\n"), text, solution, "tr -d ' ' <answer.txt", count


def edit_config(rng):
    """Change one value of a file of settings."""
    keys = rng.sample(["port", "workers", "timeout", "retries", "cache"], 4)
    values = {key: rng.randrange(10, 99) for key in keys}
    key, new = rng.choice(keys), rng.randrange(100, 999)
    lines = "".join(f"{name}={value}\n" for name, value in values.items())
    text = f"In data/app.conf, set {key} to {new}. Change nothing else."
    solution = f"sed -i 's/^{key}=.*/{key}={new}/' data/app.conf"
    expected = ",".join(f"{name}={value}" for name, value in {**values, key: new}.items())
    return {"app.conf": lines}, text, solution, "tr '\\n' , <data/app.conf | sed 's/,$//'", expected


def fix_script(rng):
    """Mend a script that fails."""
    name, number = rng.choice(NAMES), rng.randrange(2, 9)
    wrong, right = rng.choice([("ecoh", "echo"), ("exprr", "expr"), ("pritnf", "printf")])
    body = f"{wrong} {number} {'+ 1' if right == 'expr' else ''}".strip()
    text = f"bash data/{name}.sh fails: a command is misspelt. Mend the script."
    solution = f"sed -i 's/{wrong}/{right}/' data/{name}.sh"
    expected = number + (right == "expr")
    return {f"{name}.sh": f"{body}\n"}, text, solution, f"bash data/{name}.sh", expected


def parse_log(rng):
    """Count the lines of a level in a log."""
    levels = rng.choices(["INFO", "WARN", "ERROR"], k=rng.randrange(12, 30))
    lines = "".join(f"{n:02} {level} {rng.choice(NAMES)}\n" for n, level in enumerate(levels))
    level = rng.choice(["INFO", "WARN", "ERROR"])
    text = f"Write the number of {level} lines of data/app.log into answer.txt."
    solution = f"grep -c {level} data/app.log >answer.txt"
    return {"app.log": lines}, text, solution, "tr -d ' ' <answer.txt", levels.count(level)


def move_rows(rng):
    """Move rows of a CSV file into a SQLite database."""
    rows = [(name, rng.randrange(1, 50)) for name in rng.sample(NAMES, 6)]
    table = rng.choice(["sales", "visits", "loans"])
    lines = "".join(f"{name},{number}\n" for name, number in rows)
    text = f"Load data/rows.csv (name, number) into the table {table} of the SQLite file shop.db."
    create = f"create table {table}(name text, number integer)"
    solution = f"sqlite3 shop.db '{create}' '.mode csv' '.import data/rows.csv {table}'"
    check = f"sqlite3 shop.db 'select count(*), sum(number) from {table}'"
    return {"rows.csv": lines}, text, solution, check, f"6|{sum(number for _, number in rows)}"


KINDS = (count_files, edit_config, fix_script, parse_log, move_rows)


def write(folder, seed, base):
    kind = KINDS[seed % len(KINDS)]
    files, text, solution, command, expected = kind(random.Random(seed))
    place = folder / f"{kind.__name__.replace('_', '-')}-{seed:02}"
    contents = {f"environment/data/{name}": content for name, content in files.items()} | {
        "task.toml": TOML,
        "instruction.md": f"{text}\n",
        "environment/Dockerfile": f"FROM {base}\nWORKDIR /app\nCOPY data/ data/\n",
        "tests/test.sh": TEST.format(command=command, expected=expected),
        "solution/solve.sh": f"#!/bin/bash\n{solution}\n",
    }
    for name, content in contents.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(content)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--base", default="localhost/debian:bookworm")
    options = parser.parse_args()
    for number in range(40):
        write(options.folder / ("train" if number < 30 else "eval"), number, options.base)
    print(json.dumps({"train": 30, "eval": 10, "folder": str(options.folder)}))
