"""A chat template that anybody wrote takes neither time nor memory without end."""

from __future__ import annotations

import copy
import tracemalloc

import pytest

from gspo_env.chat.bounds import check_template
from gspo_env.chat.transcript import ChatTokenizer
from gspo_env.errors import ChatTemplateError
from gspo_env.recipes.build import TEMPLATE

DOUBLE = "{% set x = x ~ x %}\n"
BOMBS = {
    "repeat": "{{ 'a' * 10000000000 }}",
    "repeat a name": "{% set n = 999999 %}{{ 'a' * n }}",
    "repeat a list": "{{ ([0] * 999999) | length }}",
    "power": "{{ 10 ** 10 ** 10 }}",
    "width": "{{ '%099999999999d' % 1 }}",
    "width by name": "{{ '{:>9999999999}'.format('a') }}",
    "width in a name": "{% set f = '%099999d' %}{{ f % 1 }}",
    "width as an argument": "{{ '{:{}}'.format('a', n) }}",
    "format of a name": "{% set f = '{}' %}{{ f.format('a') }}",
    "center": "{{ 'a'.center(9999999999) }}",
    "center filter": "{{ 'a' | center(999999) }}",
    "doubling": "{% set x = 'aaaaaaaaaaaaaaaa' %}\n" + DOUBLE * 40 + "{{ x }}",
    "doubling in a loop": (
        "{% set n = namespace(x='aaaaaaaa') %}\n{% for i in range(60) %}\n"
        "{% set n.x = n.x ~ n.x %}\n{% endfor %}\n"
    ),
    "loops": "{% for a in range(99999) %}\n{% for b in range(99999) %}\n{% endfor %}\n{% endfor %}",
    "doubling in a block": "{% set x %}aaaaaaaaaaaaaaaa{% endset %}"
    + "{% set x %}{{ x }}{{ x }}{% endset %}" * 40,
    "doubling in with": "{% set x = 'aaaaaaaaaaaaaaaa' %}"
    + "{% with x = x ~ x %}" * 40
    + "{% endwith %}" * 40,
    "doubling of two names": "{% set x, y = 'aaaaaaaaaaaaaaaa', 1 %}"
    + "{% set x, y = x ~ x, y %}" * 40,
    "doubling in a macro": "{% macro f(x, n) %}{% if n %}{{ f(x ~ x, n - 1) }}{% endif %}"
    "{% endmacro %}{{ f('aaaaaaaaaaaaaaaa', 60) }}",
    "macro that calls itself twice": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
    ),
    "length": "{# " + "a" * 2**20 + " #}",
}


@pytest.mark.parametrize(
    "bomb",
    [
        pytest.param(text, id=name, marks=[pytest.mark.slow] if "macro that" in name else [])
        for name, text in BOMBS.items()
    ],
)
def test_a_bomb_is_one_error_and_takes_little_memory(tokenizer, bomb):
    hostile = copy.deepcopy(tokenizer)
    hostile.chat_template = bomb + TEMPLATE
    tracemalloc.start()
    with pytest.raises(ChatTemplateError):
        ChatTokenizer(hostile)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**28


def test_what_real_templates_compute_is_accepted(families):
    for make in families.values():
        check_template(make().chat_template)
    check_template("{{ 'Today is {}: {:>3}'.format(a, b) }} {{ '%s, %d' | format(a, b) }}")
    check_template("{{ (loop.index0 % 2 == 0) and 2 * loop.index > messages | length * 2 }}")
