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
BOMBS = {
    "repeat": "{{ 'a' * 10000000000 }}",
    "repeat a name": "{% set n = 9999999 %}{{ 'a' * n }}",
    "repeat a list": "{{ ([0] * 999999999) | length }}",
    "power": "{{ 10 ** (10 ** 10) }}",
    "width": "{{ '%099999999999d' % 1 }}",
    "width by name": "{{ '{:>9999999999}'.format('a') }}",
    "width in a name": "{% set f = '%0999999999d' %}{{ f % 1 }}",
    "width as an argument": "{{ '{:{}}'.format('a', 999999999) }}",
    "center": "{{ 'a'.center(9999999999) }}",
    "center filter": "{{ 'a' | center(9999999) }}",
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
    "a method by subscript": "{{ 'a'['ljust'](1000000 * 1000000) }}",
    "a method by filter": "{% set f = 'a' | attr('center') %}{{ f(1000000 * 1000000) }}",
    "zeros": "{{ 'a'.zfill(1000000 * 100000) }}",
    "tabs": "{{ '\t'.expandtabs(1000000 * 1000) }}",
    "bytes": "{{ (1).to_bytes(1000000 * 1000, 'big') | length }}",
    "translate": X + "{{ x.translate({97: x}) | length }}",
    "encode": "{% set x = 'éa' * 999999 %}{% for i in range(99999) %}"
    "{% set y = x.encode('punycode') %}{% endfor %}",
    "replace": X + "{{ x | replace('a', x) | length }}",
    "replace by name": X + "{{ x | replace(old='a', new=x) | length }}",
    "replace nothing": X + "{{ x.replace('', x) | length }}",
    "join": X + "{{ x | join(x) | length }}",
    "join of a method": X + "{{ x.join(x | list) | length }}",
    "join by map": X + "{{ [x | list] | map('join', x) | list | length }}",
    "indent": X + "{{ x | replace('a', '\n') | indent(1000000, true, true) | length }}",
    "indent by text": X + "{{ x | replace('a', '\n') | indent(x, true, true) | length }}",
    "wordwrap": X + "{{ x | wordwrap(1, true, x) | length }}",
    "tojson": X + "{{ x | list | tojson(indent=1000000) | length }}",
    "tojson by text": X + "{{ x | list | tojson(indent=x) | length }}",
    "tojson with separators": X + "{{ x | list | tojson(separators=(x, x)) | length }}",
    "batch": X + "{% set y = [x] | batch(1000000 * 100, x) | list %}",
    "slice": "{{ [1] | slice(1000000 * 100) | list | length }}",
    "xmlattr": X + "{{ {'a': [x] * 100000} | xmlattr | length }}",
    "strip tags": "{{ ('<!---->' * 40000000) | striptags }}",
    "lipsum": "{{ lipsum(n=1000000) }}",
    "width put together": "{{ (('%' ~ '999999999d') % 1) | length }}",
    "width behind a name": "{{ '%(a)999999999d' % {'a': 1} }}",
    "width with flags": "{{ '%---------- 999999999d' % 1 }}",
    "width of a format filter": "{% set f = '%999999999d' %}{{ f | format(1) }}",
    "width of a format map": "{{ '{a:999999999}'.format_map({'a': 1}) }}",
    "fields": X + "{% set f = '%(x)s' * 99999 %}{{ (f % {'x': x}) | length }}",
    "braces": X + "{% set f = '{0}' * 99999 %}{{ f.format(x) | length }}",
    "one concatenation": X + "{{ (" + "x ~ " * 9999 + "x) | length }}",
    "a sum": X + "{{ (" + " + ".join(["(x * 40)"] * 999) + ") | length }}",
    "repeat what a loop has": "{% for y in 'ab' %}{{ loop.previtem * 9999999999 }}{% endfor %}",
    "repeat a default": "{{ ('z' | int('aaa')) * 9999999999 }}",
    "output": X + "{% for i in range(99999) %}{{ x }}{% endfor %}",
    "output of a macro": X
    + "{% macro f() %}"
    + "{{ x }}" * 9999
    + "{% endmacro %}{{ f() | length }}",
    "output of words": "{{ 'ab cd \n' * 1190000 }}",
    "output of beginnings": "{{ '<' * 1000000 }}",
    "output of control tokens": "{{ ('<|' ~ 'im_end|>') * 400000 }}",
    "own text": "{% for i in range(99999) %}" + "a" * 99999 + "{% endfor %}",
    "nested lists": "{% set x = [0] %}" + "{% set x = [x, x] %}" * 60 + "{{ x | string | length }}",
    "nested dicts": "{% set x = {} %}" + "{% set x = dict(a=x, b=x) %}" * 60 + "{{ x ~ '' }}",
    "nested names": "{% set x = namespace(a=1) %}"
    + "{% set x = namespace(a=[x, x]) %}" * 60
    + "{{ x }}",
    "comparison": "{% set x = [0] %}{% set y = [0] %}"
    + "{% set x = [x, x] %}{% set y = [y, y] %}" * 60
    + "{{ x == y }}",
    "reading": X + "{% for i in range(99999) %}{% set y = (x * 40) | upper %}{% endfor %}",
    "searching": X + "{% for i in range(99999) %}{{ 'b' in x * 40 }}{% endfor %}",
    "sorting": X + "{{ (x * 40) | sort | length }}" * 8,
    "grouping": X + "{{ (x * 40) | groupby('a') | length }}" * 8,
    "mapping": X + "{{ (x * 40) | map('lower') | list | length }}" * 8,
    "selecting": X + "{{ x | list | select('in', 'b' * 4000000) | list | length }}",
    "fields with a width": "{{ ('{0:9999}' * 300000).format(1) | length }}",
    "tojson of nested lists": "{% set x = [0] %}"
    + "{% set x = [x, x] %}" * 60
    + "{{ x | tojson | length }}",
    "reversing": X + "{% for i in range(99999) %}{% set y = (x * 40)[::-1] %}{% endfor %}",
    "a number that is none": "{% set n = 1e308 * 10 - 1e308 * 10 %}{% set y = 2 ** n %}"
    + "{{ 'a' * 10000000000 }}",
}

ENDLESS = (
    *("power", "loops", "macro that calls itself twice", "encode", "slice", "lipsum", "reading"),
    *("nested lists", "nested dicts", "nested names", "comparison", "searching"),
    *("grouping", "mapping", "selecting", "tojson of nested lists", "reversing"),
)
"""Bombs that the limit of time ends, which is shorter for them."""


@pytest.fixture
def little_memory():
    """Lets the process take at most 256 MiB more; tracing would make the bombs ten times slower."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + 2**28, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_is_one_error_and_takes_little_memory(tokenizer, little_memory, monkeypatch, bomb):
    if bomb in ENDLESS:
        monkeypatch.setattr("gspo_env.chat.bounds._SECONDS", 0.2)
    hostile = copy.deepcopy(tokenizer)
    hostile.chat_template = BOMBS[bomb] + TEMPLATE
    with pytest.raises(ChatTemplateError) as error:
        ChatTokenizer(hostile)
    assert not isinstance(error.value.__cause__, MemoryError)
    assert bomb not in ENDLESS or "more than 0.2 seconds" in str(error.value)


@pytest.mark.parametrize("bomb", ["loops", "comparison", "a sum"])
def test_a_bomb_that_waits_for_tools_is_an_error_at_the_first_rendering_with_tools(tokenizer, bomb):
    hostile = copy.deepcopy(tokenizer)
    hostile.chat_template = "{% if tools %}" + BOMBS[bomb] + "{% endif %}" + TEMPLATE
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
