"""The built-in domains: orders of a shop, and bookings of a restaurant."""

from __future__ import annotations

from typing import Any

import numpy as np

from gspo_env.tools.tool import tool
from gspo_env.types import ToolCall
from gspo_envs.dialogue.task import PERSONAS, REFUSAL, DialogueTask, Domain, Fact

_ITEMS = "lamp chair table clock mirror carpet sofa shelf vase desk"
_CITIES = "oslo lima cairo kyoto porto turin lyon bern riga delhi"
_GUESTS = "ada ben cleo dan eva finn gia hugo ida jon kim leo mia noa pia rosa"
_DAYS = "monday tuesday wednesday thursday friday saturday sunday"
_COUNT = 6
"""Orders or bookings of a database, of which the first is the user's."""


def _pick(random: np.random.Generator, words: str) -> str:
    choices = words.split()
    return choices[int(random.integers(len(choices)))]


def _draw_columns(random: np.random.Generator, *columns: str) -> list[list[str]]:
    """Draws distinct numbers, and for each of them a word of each column."""
    numbers = [str(n) for n in random.choice(np.arange(10, 50), _COUNT, replace=False)]
    return [numbers, *([_pick(random, words) for _ in numbers] for words in columns)]


def _call(name: str, **arguments: str) -> ToolCall:
    return ToolCall(name=name, arguments=arguments)


def _task(random: Any, script: Any, opening: str, facts: Any, actions: Any) -> DialogueTask:
    """Returns a task that must be refused if it has a single action, which only looks."""
    return DialogueTask(
        script="\n".join(script),
        opening=opening,
        persona=_pick(random, " ".join(PERSONAS)),
        facts=tuple(facts),
        actions=tuple(actions),
        says=() if len(actions) > 1 else (REFUSAL,),
    )


class Orders(Domain):
    """Cancel an order, or send it to another city."""

    rules = (
        "You serve the customers of a shop. Ask for what you need, and look at an order before you "
        "change it: only a pending order may be cancelled or sent to another city. Say that it is "
        "done, or that you cannot do it."
    )

    def draw(self, random: np.random.Generator) -> DialogueTask:
        """Draws the orders, and what the customer wants with one of them."""
        columns = _draw_columns(random, _ITEMS, _CITIES, "pending pending shipped")
        order, item, old_city, status = (column[0] for column in columns)
        script = ["CREATE TABLE orders (number TEXT PRIMARY KEY, item, city, status);"]
        script += [f"INSERT INTO orders VALUES {row!r};" for row in zip(*columns, strict=True)]
        opening, change = f"Hello, I want to cancel my {item}.", _call("cancel_order", order=order)
        facts = [Fact("number", f"My order is #{order}.", "What is the number of your order?")]
        if random.integers(2):
            city = _pick(random, _CITIES.replace(old_city, ""))
            opening = f"Hello, please send my {item} to another city."
            text = f'The new city is "{city}".'
            facts.append(Fact("where city address", text, "Where should we send it?"))
            change = _call("send_order", order=order, city=city)
        actions = [_call("show_order", order=order), *([change] if status == "pending" else [])]
        return _task(random, script, opening, facts, actions)

    @tool
    def show_order(self, order: str) -> str:
        """Show the item, the city and the status of an order.

        Args:
            order: The number of the order.
        """
        rows = self.rows("SELECT item, city, status FROM orders WHERE number = ?", order)
        return "item {}, city {}, status {}".format(*rows[0]) if rows else "no such order"

    @tool
    def cancel_order(self, order: str) -> str:
        """Cancel an order.

        Args:
            order: The number of the order.
        """
        return self._set("status", "cancelled", order)

    @tool
    def send_order(self, order: str, city: str) -> str:
        """Send an order to another city.

        Args:
            order: The number of the order.
            city: The new city.
        """
        return self._set("city", city, order)

    def _set(self, column: str, value: str, order: str) -> str:
        sql = f"UPDATE orders SET {column} = ? WHERE number = ? RETURNING number"
        return "changed" if self.rows(sql, value, order) else "no such order"


class Bookings(Domain):
    """Book a table."""

    rules = (
        "You take the bookings of a restaurant. Ask for what you need, and look at the free tables "
        "of a day: book only if there are any. Say that it is done, or that you cannot do it."
    )

    def draw(self, random: np.random.Generator) -> DialogueTask:
        """Draws the bookings and the free tables, and what the guest wants."""
        day, guest = _pick(random, _DAYS), _pick(random, _GUESTS)
        rows = [*zip(*_draw_columns(random, _GUESTS, _DAYS), strict=True)]
        free = {
            name: int(random.integers(1, 5) * (random.integers(3) > 0)) for name in _DAYS.split()
        }
        script = ["CREATE TABLE bookings (number, guest, day);"]
        script += ["CREATE TABLE days (day TEXT PRIMARY KEY, free INTEGER);"]
        script += [f"INSERT INTO bookings VALUES {row!r};" for row in rows]
        script += [f"INSERT INTO days VALUES {row!r};" for row in free.items()]
        facts = [Fact("name", f'My name is "{guest}".', "What is your name?")]
        facts += [Fact("day when", f'Put me on "{day}".', "For which day?")]
        book = [_call("book_table", guest=guest, day=day)] if free[day] else []
        actions = [_call("free_tables", day=day), *book]
        return _task(random, script, "I would like a table.", facts, actions)

    @tool
    def free_tables(self, day: str) -> str:
        """Show how many tables are free on a day.

        Args:
            day: The day of the week.
        """
        rows = self.rows("SELECT free FROM days WHERE day = ?", day)
        return f"{rows[0][0]} free" if rows else "no such day"

    @tool
    def book_table(self, guest: str, day: str) -> str:
        """Book a table for a guest.

        Args:
            guest: The guest's name.
            day: The day of the week.
        """
        if not self.rows("UPDATE days SET free = free - 1 WHERE day = ? RETURNING day", day):
            return "no such day"
        self.rows("INSERT INTO bookings SELECT max(number) + 1, ?, ? FROM bookings", guest, day)
        return "booked"
