"""The tokenizer of one model, as a gateway needs it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from services.gateway.text.chat import ChatTemplate
from services.gateway.text.detokenizer import DecoderPlan, Detokenizer
from services.gateway.text.model_files import ModelText, read_model_text
from shared.errors import ConfigError, InvalidRequest


class TextTokenizer:
    """Text to tokens and back. All methods may be called from several threads at once.

    `encode` and `render_chat` are heavy: call them outside the event loop. `encode` releases the GIL.
    """

    def __init__(self, tokenizer: Tokenizer, model: ModelText) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._plan = DecoderPlan(tokenizer)
        template = model.chat_template
        self._template = None if template is None else ChatTemplate(template, model.special_tokens)
        self.vocab_size = model.vocab_size
        self.max_model_len = model.max_model_len
        self.special_token_ids = frozenset(
            token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special
        )
        bos = model.special_tokens.get("bos_token")
        self.bos_token_id: int | None = None if bos is None else tokenizer.token_to_id(bos)
        self.eos_token_ids = model.eos_token_ids or _eos_of(tokenizer, model)
        self._longest_token = _longest_token(tokenizer)

    @classmethod
    def from_folder(cls, path: Path) -> "TextTokenizer":
        """Read `tokenizer.json` and the configuration files of a model folder.

        Raises:
            ConfigError: a file is missing or unreadable, or the decoder or the template is not supported.
        """
        file = path / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(f"{file}: missing; the gateway needs a tokenizer in this form")
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(f"{file}: {error}") from error
        return cls(tokenizer, read_model_text(path, tokenizer_size=tokenizer.get_vocab_size()))

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`; with `add_special_tokens`, those that the tokenizer puts around a text (BOS, …)."""
        # The batch form releases the GIL, the single form does not.
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `tokens` as a whole."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens)

    def start_detokenizer(self, *, continues: bool = False, skip_special_tokens: bool = True) -> Detokenizer:
        """An incremental `decode`; see `DecoderPlan.start`."""
        return self._plan.start(continues=continues, skip_special_tokens=skip_special_tokens)

    def least_tokens(self, text: str) -> int:
        """A lower bound on `len(encode(text))` that costs nothing, to refuse a hopeless text; 0 if none is known."""
        return len(text) // self._longest_token if self._longest_token else 0

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """The prompt text of a conversation; encode it without special tokens.

        Raises:
            InvalidRequest: the model has no chat template, or the template refuses the messages.
        """
        if self._template is None:
            raise InvalidRequest("this model has no chat template; use /v1/completions", param="messages")
        return self._template.render(
            messages, add_generation_prompt=add_generation_prompt, continue_final_message=continue_final_message
        )


def _eos_of(tokenizer: Tokenizer, model: ModelText) -> tuple[int, ...]:
    """For a model whose configuration names no EOS: the tokenizer's."""
    token = tokenizer.token_to_id(model.special_tokens.get("eos_token", ""))
    return () if token is None else (token,)


def _longest_token(tokenizer: Tokenizer) -> int:
    """Most bytes of text that one token can stand for, where that is certain; else 0.

    In a byte-level vocabulary each character of a token is one byte of text, unless a normalizer changed the text or an
    added token swallows the white space around it.
    """
    is_byte_level = type(tokenizer.decoder).__name__ == "ByteLevel"
    added = tokenizer.get_added_tokens_decoder().values()
    if not is_byte_level or tokenizer.normalizer is not None or any(token.lstrip or token.rstrip for token in added):
        return 0
    return max(len(content.encode()) for content in tokenizer.get_vocab())
