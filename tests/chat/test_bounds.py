"""A chat template that anybody wrote takes neither time nor memory without end."""

import copy
import resource
from pathlib import Path

import pytest

from gspo_env.chat.bounds import BoundedTemplate
from gspo_env.chat.template import ChatTemplate
from gspo_env.chat.tokenizer import ChatTokenizer
from gspo_env.errors import ChatTemplateError, TemplateBoundsError
from gspo_env.recipes.build import TEMPLATE

DOUBLE = "{% set x = x ~ x %}\n"
X = "{% set x = 'a' * 99999 %}"
TOO_LARGE = {
    "repeat": "{{ 'a' * 10000000000 }}",
    "repeat a list": "{{ ([0] * 999999999) | length }}",
    "width": "{{ '%099999999999d' % 1 }}",
    "doubling": "{% set x = 'aaaaaaaaaaaaaaaa' %}\n" + DOUBLE * 40 + "{{ x }}",
    "doubling in a macro": "{% macro f(x, n) %}{% if n %}{{ f(x ~ x, n - 1) }}{% endif %}"
    "{% endmacro %}{{ f('aaaaaaaaaaaaaaaa', 60) }}",
    "a method by filter": "{% set f = 'a' | attr('center') %}{{ f(1000000 * 1000000) }}",
    "replace": X + "{{ x | replace('a', x) | length }}",
    "tojson": X + "{{ x | list | tojson(indent=1000000) | length }}",
    "batch": X + "{% set y = [x] | batch(1000000 * 100, x) | list %}",
    "strip tags": "{{ ('<!---->' * 40000000) | striptags }}",
    "fields": X + "{% set f = '%(x)s' * 99999 %}{{ (f % {'x': x}) | length }}",
    "one concatenation": X + "{{ (" + "x ~ " * 9999 + "x) | length }}",
    "output": X + "{% for i in range(99999) %}{{ x }}{% endfor %}",
    "own text": "{% for i in range(99999) %}" + "a" * 99999 + "{% endfor %}",
}
TOO_LONG = {
    "repeat a name": "{% set n = 9999999 %}{{ 'a' * n }}",
    "words": "{{ 'ab cd \n' * 1190000 }}",
    "beginnings": "{{ '<' * 1000000 }}",
    "control tokens": "{{ ('<|' ~ 'im_end|>') * 400000 }}",
}
ENDLESS = {
    "power": "{{ 10 ** (10 ** 10) }}",
    "loops": "{% for a in range(99999) %}\n{% for b in range(99999) %}\n{% endfor %}\n{% endfor %}",
    "macro that calls itself twice": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
    ),
    "encode": "{% set x = 'éa' * 999999 %}{% for i in range(99999) %}"
    "{% set y = x.encode('punycode') %}{% endfor %}",
    "nested lists": "{% set x = [0] %}" + "{% set x = [x, x] %}" * 60 + "{{ x | string | length }}",
    "comparison": "{% set x = [0] %}{% set y = [0] %}"
    + "{% set x = [x, x] %}{% set y = [y, y] %}" * 60
    + "{{ x == y }}",
    "searching": X + "{% for i in range(99999) %}{{ 'b' in x * 40 }}{% endfor %}",
    "mapping": X + "{{ (x * 40) | map('lower') | list | length }}" * 8,
}
"""Bombs that the limit of time ends."""
A_SUM = X + "{{ (" + " + ".join(["(x * 40)"] * 999) + ") | length }}"


@pytest.fixture
def little_memory():
    """Lets the process take at most 256 MiB more; tracing would make the bombs ten times slower."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + 2**28, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.mark.parametrize(
    ("bomb", "sentence"),
    [
        *((bomb, "it takes too much memory") for bomb in TOO_LARGE.values()),
        *((bomb, r"it writes more than \d+ characters") for bomb in TOO_LONG.values()),
        *((bomb, "it takes more than 0.2 seconds of CPU time") for bomb in ENDLESS.values()),
        ("{# " + "a" * 2**20 + " #}", "it has 1,049,0.. characters"),
        (A_SUM, "it cannot be parsed"),
    ],
    ids=[*TOO_LARGE, *TOO_LONG, *ENDLESS, "length", "a sum"],
)
def test_a_bomb_is_one_error_and_takes_little_memory(
    tokenizer, little_memory, monkeypatch, bomb, sentence
):
    if bomb in ENDLESS.values():
        monkeypatch.setattr("gspo_env.chat.bounds._SECONDS", 0.2)
    hostile = copy.deepcopy(tokenizer)
    hostile.chat_template = bomb + TEMPLATE
    with pytest.raises(ChatTemplateError, match=sentence) as error:
        ChatTokenizer(hostile)
    assert not isinstance(error.value.__cause__, MemoryError)


@pytest.mark.parametrize("bomb", [ENDLESS["loops"], ENDLESS["comparison"], A_SUM], ids=range(3))
def test_a_bomb_that_waits_for_tools_is_an_error_at_the_first_rendering_with_tools(tokenizer, bomb):
    hostile = copy.deepcopy(tokenizer)
    hostile.chat_template = "{% if tools %}" + bomb + "{% endif %}" + TEMPLATE
    with pytest.raises(TemplateBoundsError):
        _ = ChatTemplate(hostile).shows_tools


@pytest.mark.parametrize(
    ("bomb", "sentence"),
    [
        ("{% set x = 7 ** 999999 %}", "it is slow again and again"),
        ("{{ " + "9" * 130000 + " }}", "it cannot be parsed"),
        ("{% for", "it cannot be parsed"),
        ("{{ " + "not " * 20000 + "1 }}", "it cannot be parsed"),
    ],
)
def test_a_template_that_fails_slowly_or_always_is_not_tried_again_and_again(
    tokenizer, bomb, sentence
):
    hostile = copy.deepcopy(tokenizer)
    hostile.chat_template = bomb + TEMPLATE
    with pytest.raises(TemplateBoundsError, match=sentence):
        ChatTokenizer(hostile)


@pytest.mark.slow
def test_what_other_templates_leave_behind_refuses_none():
    """A child keeps the templates that it has rendered, and has a limit of memory."""
    for number in range(400):
        large = BoundedTemplate(
            f"{{{{ {number} }}}}{{# #}}" + "\U0001f600" * 131_000, lambda text, _: text
        )
        assert large.render().startswith(str(number))


def test_a_template_may_write_a_multiple_of_what_it_gets(tokenizer):
    """Escapes, and the indents of a deep schema."""
    tame, schema = copy.deepcopy(tokenizer), {"a": "é" * 99_999}
    for _ in range(20):
        schema = {"type": "object", "properties": {"x": schema, "y": {"type": "string"}}}
    tame.chat_template = "{{ tools | tojson(indent=4, ensure_ascii=true) }}" * 2
    written = ChatTemplate(tame).render([{"role": "user", "content": "amber"}], [schema])
    assert written.count("\\u00e9") == 199_998


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'Today is {}: {:>3}'.format('a', 7) }} {{ '%s, %d' | format('a', 7) }}",
        "{{ '%-8s|%.2f' % ('a', 7.0) }} {{ ['a', 'b'] | join('\n') }} {{ 'a' ~ 7 ~ none }}",
        "{{ {'a': ['b', 1.5]} | tojson(indent=4) }} {{ [1] | tojson(separators=(',', ':')) }}",
        "{{ {'é': none} | tojson(ensure_ascii=true) }} {{ 'a\nb' | indent }} {{ 'a'.center(9) }}",
        "{{ messages | map(attribute='role') | select('equalto', 'user') | list | length }}",
        "{{ messages[:-1] + [1] }} {{ 2 ** 8 + 7 % 4 * 3 - 1 }} {{ missing }} {{ 'a' * 3 }}",
        "{% macro f(x) %}{{ x | upper }}{% endmacro %}{{ f('a') }} {{ namespace(a=1) }}",
        "{{ 'aba'.replace('a', 'cc') | replace('c', 'd', 1) }} {{ 'a,b'.split(',') | last }}",
    ],
)
def test_what_real_templates_compute_is_what_jinja_gives(tokenizer, source):
    tame, chat = copy.deepcopy(tokenizer), [{"role": "user", "content": "amber"}]
    tame.chat_template = source
    expected = tokenizer.apply_chat_template(chat, chat_template=source, tokenize=False)
    assert ChatTemplate(tame).render(chat) == expected
