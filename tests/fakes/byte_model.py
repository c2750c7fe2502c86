"""A model folder whose tokens are bytes: what a test wants a client to see, it can spell as token ids."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from services.gateway.text.detokenizer import BYTE_OF_CHARACTER
from tests.fakes.scripted_pool import Script

START, END, EOS = 256, 257, 258
VOCAB_SIZE = 259
MAX_MODEL_LEN = 512

_TEMPLATE = """\
{% for m in messages %}<|start|>{{ m.role }}
{{ m.content }}<|end|>
{% endfor %}{% if add_generation_prompt %}<|start|>assistant
{% endif %}"""


def write_byte_model(folder: Path, max_model_len: int = MAX_MODEL_LEN) -> Path:
    """Write tokenizer, template and configuration into `folder`."""
    tokenizer = Tokenizer(models.BPE(vocab=BYTE_OF_CHARACTER, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<|start|>", "<|end|>", "<|eos|>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"vocab_size": VOCAB_SIZE, "eos_token_id": EOS, "max_position_embeddings": max_model_len}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|eos|>"}))
    (folder / "chat_template.jinja").write_text(_TEMPLATE)
    return folder


def answer(text: str, **options: Any) -> Script:
    """A script that says `text` and ends with EOS."""
    return Script((*spell(text), EOS), **options)


def spell(text: str) -> list[int]:
    """The tokens of `text`."""
    return list(text.encode())
