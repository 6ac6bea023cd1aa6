"""Sums, and a reward for the right number: `python examples/sums.py` writes `sums.jsonl`."""

import json
import random
import re
from pathlib import Path


def last_number(attempt):
    """Returns 1 if the last number of an answer is the sum, else 0."""
    numbers = re.findall(r"\d+", attempt.text)
    return float(numbers[-1:] == [attempt.row["answer"]])


def main():
    rows = [
        {"prompt": f"What is {a} + {b}? Answer with the number only.", "answer": str(a + b)}
        for a in range(11, 41)
        for b in range(11, 41)
    ]
    random.Random(0).shuffle(rows)
    Path("sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
