"""The end of a text by its tokenizer, for model folders whose configuration names none. The gateway does the same."""

from pathlib import Path

from services.gpu_worker.models.fields import Raw


def eos_of_tokenizer(folder: Path, tokenizer_config: Raw) -> tuple[int, ...]:
    """The id of `eos_token`, if the folder has a tokenizer that knows it.

    Args:
        folder: with `tokenizer.json`.
        tokenizer_config: its `tokenizer_config.json`.
    """
    token = tokenizer_config.get("eos_token")
    content = token.get("content") if isinstance(token, dict) else token
    file = folder / "tokenizer.json"
    if not isinstance(content, str) or not file.is_file():
        return ()
    # A large file: read only if it is needed.
    from tokenizers import Tokenizer

    number = Tokenizer.from_file(str(file)).token_to_id(content)
    return () if number is None else (number,)
