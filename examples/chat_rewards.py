"""Rewards of `examples/chat.toml`: an answer that ends with the right word, and has few others."""


def right(attempt):
    return float(attempt.text.split()[-1:] == [attempt.row["answer"]])


def short(attempt):
    return right(attempt) * (len(attempt.text) <= 20)
