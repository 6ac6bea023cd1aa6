"""Rewards of `examples/chat.toml`: a right answer, and a short one."""


def right(attempt):
    return float(attempt.row["answer"] in attempt.text.split())


def short(attempt):
    return float(len(attempt.text) <= 20)
