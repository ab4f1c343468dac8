from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from rpg_jax.data import chat
from rpg_jax.data.chat import ChatTemplate

MESSAGES = [{"role": "user", "content": "hi"}]


def test_templates_see_the_messages_and_special_tokens():
    template = ChatTemplate("{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}", {"bos_token": "<s>"})
    assert template(MESSAGES) == "<s>hi"


def test_templates_see_the_tools_of_the_first_message_and_no_keys_of_an_environment():
    template = ChatTemplate("{{ tools }}{% for m in messages %}{{ m.keys() | list }}{% endfor %}")
    assert template([{**MESSAGES[0], "tools": [1], "sum": 2}]) == "[1]['role', 'content']"
    assert template(MESSAGES) == "None['role', 'content']"


def test_json_is_written_with_the_arguments_of_transformers():
    template = ChatTemplate("{{ messages[0] | tojson(ensure_ascii=True, separators=(',', ':'), sort_keys=True) }}")
    assert template([{"role": "user", "content": "é"}]) == '{"content":"\\u00e9","role":"user"}'
    assert ChatTemplate("{{ messages[0].content | tojson(ensure_ascii=False) }}")([{"content": "é"}]) == '"é"'


def test_the_default_of_several_templates_is_taken():
    assert ChatTemplate([{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}])(MESSAGES) == "d"
    with pytest.raises(ValueError, match="'tools'.*no 'default'"):
        ChatTemplate([{"name": "tools", "template": "t"}])


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{% set _ = messages.append(1) %}",
    ],
)
def test_a_template_cannot_leave_the_sandbox(attack):
    with pytest.raises(ValueError, match="chat template"):
        ChatTemplate(attack)(MESSAGES)


def test_template_errors_say_what_is_wrong():
    with pytest.raises(ValueError, match="line 2"):
        ChatTemplate("ok\n{% if %}")
    with pytest.raises(ValueError, match="only user turns"):
        ChatTemplate("{{ raise_exception('only user turns') }}")(MESSAGES)


FAILING = {
    "ZeroDivisionError": "{{ 1 // 0 }}",
    "OverflowError": "{{ range(10 ** 30) }}",
    "RecursionError": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "TypeError": "{{ messages + 1 }}",
    "ValueError": "{{ '%d' | format('x') }}",
    "no attribute": "{{ messages[0].content.nothing.more }}",
}
ENDLESS = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a power": "{{ 10 ** (10 ** 10) }}",
    "doubling": "{% set n = namespace(x='x') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "doubling blocks": "{% macro f(n) %}{% if n %}{% set x %}{{ f(n - 1) }}{% endset %}{{ x }}{{ x }}"
    "{% else %}x{% endif %}{% endmacro %}{{ f(60) }}",
    "a long output": "{% for a in range(99999) %}{{ 'x' * 999 }}{% endfor %}",
    "constants": "{% for a in [1] * 999999 %}{% for b in 'x' * 999999 %}{% endfor %}{% endfor %}",
    "many slices": "{{ [1] | slice(10 ** 9) | list }}",
    "words": "{{ lipsum(n=9, max=10 ** 9) }}",
    "doubling by a filter": "{% set n = namespace(x='a') %}{% for i in range(99) %}"
    "{% set n.x = n.x | replace('a', 'aa') %}{% endfor %}",
    "doubling by a macro": "{% macro f(x) %}{{ x }}{{ x }}{% endmacro %}{% set n = namespace(x='a') %}"
    "{% for i in range(99) %}{% set n.x = f(n.x) %}{% endfor %}",
    "doubling by a block": "{% set n = namespace(x='a') %}{% for i in range(99) %}"
    "{% set n.x %}{{ n.x }}{{ n.x }}{% endset %}{% endfor %}",
    "padding by %": "{{ '%1000000000s' % 1 }}",
    "padding by a method": "{{ 'x'.ljust(10 ** 9) }}",
    "padding by format": "{{ '{:1000000000}'.format(1) }}",
    "an indent": "{{ messages | tojson(indent=10 ** 9) }}",
    "a replacement": "{{ ('x' * 100000).replace('', 'y' * 100000) }}",
}


@pytest.mark.parametrize("attack", FAILING)
def test_a_template_that_fails_is_one_line(attack):
    with pytest.raises(ValueError, match=r"^the chat template failed: \w+"):
        ChatTemplate(FAILING[attack])(MESSAGES)


@pytest.mark.parametrize("attack", ENDLESS)
def test_a_template_without_end_is_ended(attack, monkeypatch):
    monkeypatch.setattr(chat, "SECONDS", 0)  # so at most 1
    with pytest.raises(ValueError, match=r"^the chat template failed: (it takes more than|its text has more than) "):
        ChatTemplate(ENDLESS[attack])(MESSAGES)


def test_threads_have_their_own_texts_also_after_the_process_of_the_templates_ended():
    template, texts = ChatTemplate("{{ messages[0].content }}"), {}
    chat._renderer._process.kill()
    chat._renderer._process.wait()
    threads = [
        threading.Thread(target=lambda i=i: texts.update({i: template([{"role": "user", "content": f"{i}"}])}))
        for i in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {i: f"{i}" for i in range(8)}


def test_a_fork_has_a_process_of_its_own():
    """Two processes that shared its pipes would take each other's texts."""
    program = (
        "import os, runpy; template = runpy.run_path({file!r}, run_name='chat')['ChatTemplate']('{{{{ messages }}}}')\n"
        "child = os.fork()\n"
        "for i in range(99): assert f'{{child}}-{{i}}' in template([{{'role': f'{{child}}-{{i}}'}}])\n"
        "assert not child or os.waitpid(child, 0)[1] == 0"
    )
    subprocess.run([sys.executable, "-P", "-c", program.format(file=chat.__file__)], check=True, timeout=60)


def test_loops_keep_their_words():
    text = (
        "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ m.role ~ ':' ~ none }}{{ loop.last }}{% endfor %}"
    )
    assert ChatTemplate(text)(MESSAGES) == "1/1user:NoneTrue"
    reversed_and_filtered = "{% for m in messages[::-1] if m.content %}{{ m.content }}{% else %}none{% endfor %}"
    assert ChatTemplate(reversed_and_filtered)([]) == "none"
