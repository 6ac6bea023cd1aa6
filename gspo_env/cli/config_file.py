"""Reads a config file; an error names all of its faults, each with its line."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import cache, partial, reduce
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from gspo_env.config import read_toml
from gspo_env.errors import ConfigError
from gspo_env.given_file import read_given
from gspo_env.registry import BUILTIN

T = TypeVar("T")
_MOST_BYTES, _MOST_FAULTS = 1 << 20, 20

Tree = dict[str, Any]
Place = tuple[str, ...]
"""The keys that lead to a value or a table."""


def read_config(file: str, parse: Callable[[Tree], T]) -> T:
    """Reads a TOML file.

    Args:
        file: The file.
        parse: Makes a config of its tree, which it may change.

    Raises:
        ConfigError: The file cannot be read, or has faults.
    """
    read = cache(partial(read_given, max_bytes=_MOST_BYTES))  # a pipe can be read once
    tree = read_toml(file, read)
    try:
        return parse(deepcopy(tree))
    except ConfigError:
        faults = list(islice(_find_faults(tree, parse), _MOST_FAULTS))
        if not faults:  # such as one of a flag
            raise
    lines = read(Path(file)).decode("utf-8-sig").splitlines()
    places = sorted((_line_of(lines, place), message) for place, message in faults)
    if len(places) == 1:
        raise ConfigError(f"{file}, line {places[0][0]}: {places[0][1]}")
    listed = "".join(f"\n  line {line}: {message}" for line, message in places)
    least = "at least " * (len(places) == _MOST_FAULTS)
    raise ConfigError(f"{file} has {least}{len(places)} faults:{listed}")


def _find_faults(tree: Tree, parse: Callable[[Tree], object]) -> Iterator[tuple[Place, str]]:
    """Yields each fault with its place: the first one without which the error is another."""
    while message := _message(tree, parse):
        for place in _places(tree, message):
            rest = _without(tree, place)
            if _message(rest, parse) != message:
                yield place, message
                tree = rest
                break
        else:
            return


def _message(tree: Tree, parse: Callable[[Tree], object]) -> str:
    try:
        parse(deepcopy(tree))
    except ConfigError as error:
        return str(error)
    return ""


def _places(tree: Tree, message: str) -> list[Place]:
    """Returns the places of values, then those of tables; what an error names comes first."""
    places: list[Place] = []

    def walk(table: Tree, above: Place) -> None:
        for name, value in table.items():
            if isinstance(value, dict):
                walk(value, (*above, name))
            places.append((*above, name))

    walk(tree, ())
    return sorted(places, key=lambda p: (isinstance(_at(tree, p), dict), p[-1] not in message))


def _at(tree: Any, place: Place) -> Any:
    return reduce(lambda table, key: table[key], place, tree)


def _without(tree: Tree, place: Place) -> Tree:
    """Removes a value or a table; with the name of a choice, the settings of the choice."""
    if len(place) == 2 and place[0] in BUILTIN and place[1] == "name":
        place = place[:1]
    rest = deepcopy(tree)
    del _at(rest, place[:-1])[place[-1]]
    return rest


def _line_of(lines: list[str], place: Place) -> int:
    """Returns the line at which the statement begins that defines a place."""
    header, first = "", 1
    for number, line in enumerate(lines, start=1):
        try:
            tree = tomllib.loads("\n".join([header, *lines[first - 1 : number]]))
        except tomllib.TOMLDecodeError:  # the statement has more lines
            continue
        try:
            _at(tree, place)
        except (KeyError, TypeError):
            header = line if first == number and line.lstrip().startswith("[") else header
            first = number + 1
        else:
            break
    return first
