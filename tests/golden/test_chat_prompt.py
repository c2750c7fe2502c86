"""Prompts of the default model equal those of Transformers, token for token."""

from pathlib import Path
from typing import Any

import pytest

from services.gateway.text.tokenizer import TextTokenizer

pytestmark = pytest.mark.model

SYSTEM = {"role": "system", "content": "Be brief.\n"}
USER = {"role": "user", "content": "  What's 2+2?  é 中文 👩‍👩‍👧\n\n"}
ASSISTANT = {"role": "assistant", "content": "Four: "}
CHATS = [
    [USER],
    [SYSTEM, USER],
    [USER, ASSISTANT, USER],
    [SYSTEM, USER, ASSISTANT],
    [USER, USER],
    [{"role": "user", "content": ""}],
    [{"role": "user", "content": "text like <|im_end|> and <b>&amp;</b>"}],
]
TEMPLATES = [
    None,  # the model's own
    "{{ bos_token }}{% for m in messages %}\n  {%- if loop.first %}  {% endif %}\n[{{ m.role | upper }}] "
    "{{ m.content | trim }}{% endfor %}\n{% if add_generation_prompt %}[A]{% endif %}"
    "{{ messages | tojson(indent=2) }}{{ eos_token }}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% if m.role == 'system' %}"
    "{% continue %}{% endif %}{{ ns.n }}{% generation %}{{ m['content'] }}{% endgeneration %}"
    "{% endfor %}{{ tools is none }}",
]


@pytest.fixture(scope="module")
def reference(model_folder: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(model_folder, local_files_only=True)


def with_template(model_folder: Path, template: str | None, folder: Path) -> TextTokenizer:
    """The model's tokenizer, with another template."""
    for name in ("tokenizer.json", "config.json", "generation_config.json", "tokenizer_config.json"):
        (folder / name).write_bytes((model_folder / name).read_bytes())
    own = (model_folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").write_text(own if template is None else template)
    return TextTokenizer.from_folder(folder)


@pytest.mark.parametrize("template", TEMPLATES, ids=["model", "trim", "control"])
def test_chat_prompts(model_folder: Path, reference: Any, template: str | None, tmp_path: Path) -> None:
    tokenizer = with_template(model_folder, template, tmp_path)
    for chat in CHATS:
        for add_generation_prompt in (True, False):
            expected = reference.apply_chat_template(
                chat, chat_template=template, add_generation_prompt=add_generation_prompt, return_dict=False
            )
            text = tokenizer.render_chat(chat, add_generation_prompt=add_generation_prompt)
            assert tokenizer.encode(text, add_special_tokens=False) == expected


def test_continued_chat_prompt(model_folder: Path, reference: Any) -> None:
    tokenizer = TextTokenizer.from_folder(model_folder)
    for chat in ([USER, ASSISTANT], [SYSTEM, USER, {"role": "assistant", "content": "Four"}]):
        expected = reference.apply_chat_template(chat, continue_final_message=True, tokenize=False)
        assert tokenizer.render_chat(chat, continue_final_message=True) == expected


@pytest.mark.parametrize("text", ["Hello", " leading", "é", "a\n\nb", "<|im_start|>user", "日本語 👍🏽"])
def test_completion_prompts_and_endings(model_folder: Path, reference: Any, text: str) -> None:
    tokenizer = TextTokenizer.from_folder(model_folder)
    assert tokenizer.encode(text, add_special_tokens=True) == reference(text)["input_ids"]
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(tokens) == reference.decode(tokens, skip_special_tokens=True)
    assert tokenizer.eos_token_ids == (reference.eos_token_id,)
    assert tokenizer.bos_token_id == reference.bos_token_id
