from __future__ import annotations

import pytest

from rpg_jax.data.chat import ChatTemplate

MESSAGES = [{"role": "user", "content": "hi"}]


def test_templates_see_the_messages_and_special_tokens():
    template = ChatTemplate("{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}", {"bos_token": "<s>"})
    assert template(MESSAGES) == "<s>hi"


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
