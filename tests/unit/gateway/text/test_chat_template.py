"""Chat templates: what they may do, and how they refuse."""

from datetime import datetime

import pytest

from services.gateway.text.chat import ChatTemplate
from shared.errors import ConfigError, InvalidRequest

USER = {"role": "user", "content": "hi <b>&</b>"}
ASSISTANT = {"role": "assistant", "content": "Sure:  "}
PLAIN = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def test_renders_roles_content_and_generation_prompt() -> None:
    template = ChatTemplate(PLAIN, {})
    assert template.render([USER]) == "[user]hi <b>&</b>[end][assistant]"
    assert template.render([USER], add_generation_prompt=False) == "[user]hi <b>&</b>[end]"


def test_special_tokens_json_clock_loop_controls_and_generation_blocks() -> None:
    source = (
        "{{ bos_token }}{{ strftime_now('%Y') }}{{ messages | tojson }}"
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{% break %}{% endfor %}"
        "{% generation %}kept{% endgeneration %}"
    )
    template = ChatTemplate(source, {"bos_token": "<s>"}, clock=lambda: datetime(2031, 2, 3))
    assert template.render([{"role": "user", "content": "é<"}]) == '<s>2031[{"role": "user", "content": "é<"}]kept'


def test_blocks_are_trimmed() -> None:
    assert ChatTemplate("  {% if true %}\nx\n  {% endif %}\ny", {}).render([USER]) == "x\ny"


def test_continues_the_final_message_with_its_trailing_spaces() -> None:
    template = ChatTemplate(PLAIN, {})
    assert template.render([USER, ASSISTANT], continue_final_message=True) == "[user]hi <b>&</b>[end][assistant]Sure:  "
    with pytest.raises(InvalidRequest) as error:
        ChatTemplate("{{ messages[0].content }}", {}).render([USER, ASSISTANT], continue_final_message=True)
    assert error.value.param == "continue_final_message"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('system must be first') }}", "system must be first"),
        ("{{ messages[0].content + 1 }}", "cannot render"),
        ("{{ messages[7].content.strip() }}", "refuses|cannot render"),
        ("{{ nothing.at.all }}", "refuses"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "cannot render"),
    ],
)
def test_a_refusal_is_the_clients_error(source: str, message: str) -> None:
    """Case 63: 400 with the template's message, not 500."""
    with pytest.raises(InvalidRequest, match=message) as error:
        ChatTemplate(source, {}).render([USER])
    assert (error.value.param, error.value.status) == ("messages", 400)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__ }}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_templates_run_in_a_sandbox(source: str) -> None:
    messages = [dict(USER)]
    try:
        rendered = ChatTemplate(source, {}).render(messages)
    except InvalidRequest:
        rendered = ""
    assert rendered == ""
    assert messages == [USER]


def test_a_template_that_does_not_compile_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="chat template"):
        ChatTemplate("{% if %}", {})
