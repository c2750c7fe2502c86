"""Tokens to text, one token at a time: for any sequence, the concatenation equals `decode` of the whole.

`DecoderPlan` reads the decoder of a tokenizer once and caches what each token id contributes; a `Detokenizer` is the
state of one stream. The library's own stream decoder is not used: it drops bytes that never become a character, and it
decodes a growing window again for every token while bytes are pending.
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import tokenizers
from tokenizers import Tokenizer, decoders

from services.gateway.text.decoder_stages import (
    ByteRuns,
    FusedStrip,
    Mapped,
    MetaspaceWords,
    Piece,
    SpaceJoined,
    Stage,
    SuffixedWords,
    Utf8Bytes,
    WordPieces,
    strip,
)
from shared.errors import ConfigError

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

StageFactory = Callable[[bool], Stage]
"""Makes a stage for a new stream; the argument says whether the stream begins a text or continues one."""


@dataclass(frozen=True, slots=True)
class _Pipeline:
    """A decoder, taken apart: what depends on the token alone, and the stages that keep state."""

    to_piece: Callable[[str], Piece]
    stages: tuple[StageFactory, ...]


class DecoderPlan:
    """How one tokenizer's tokens become text. Shared by all streams; threads may share it too.

    Raises:
        ConfigError: the tokenizer has a decoder that cannot run incrementally.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._pipeline = _read_pipeline(tokenizer)
        added = tokenizer.get_added_tokens_decoder().values()
        self._special = frozenset(token.content for token in added if token.special)
        self._pieces: dict[int, Piece | None] = {}
        self._pieces_with_special: dict[int, Piece | None] = {}

    def start(self, *, continues: bool = False, skip_special_tokens: bool = True) -> "Detokenizer":
        """A new stream. `continues`: text precedes it, so that nothing is stripped from its beginning."""
        cache = self._pieces if skip_special_tokens else self._pieces_with_special
        stages = [make(not continues) for make in self._pipeline.stages]
        return Detokenizer(self, cache, stages, skip_special_tokens)

    def piece(self, token: int, skip_special_tokens: bool) -> Piece | None:
        """What `token` puts into the first stage; None if it has no text or its text is not shown."""
        content = self._tokenizer.id_to_token(token)
        if content is None or (skip_special_tokens and content in self._special):
            return None
        return self._pipeline.to_piece(content)


class Detokenizer:
    """The text of one token sequence."""

    def __init__(
        self, plan: DecoderPlan, cache: dict[int, Piece | None], stages: Sequence[Stage], skip_special_tokens: bool
    ) -> None:
        self._plan = plan
        self._cache = cache
        self._stages = stages
        self._skip_special_tokens = skip_special_tokens

    def push(self, token: int) -> str:
        """The text that is final once `token` is known; never part of a code point."""
        try:
            piece = self._cache[token]
        except KeyError:
            piece = self._cache[token] = self._plan.piece(token, self._skip_special_tokens)
        if piece is None:
            return ""
        pieces = self._stages[0].push(piece) if self._stages else (piece,)
        return self._run(pieces, 1) if pieces else ""

    def flush(self) -> str:
        """What was held, now that no token follows."""
        parts = [self._run(stage.flush(), position + 1) for position, stage in enumerate(self._stages)]
        return "".join(parts)

    def _run(self, pieces: Sequence[Piece], first_stage: int) -> str:
        for stage in self._stages[first_stage:]:
            pieces = [out for piece in pieces for out in stage.push(piece)]
        return "".join(pieces)  # type: ignore[arg-type]  # bytes exist only before a first stage that consumes them


# ---------------------------------------------------------------- reading the decoder


def _read_pipeline(tokenizer: Tokenizer) -> _Pipeline:
    decoder = tokenizer.decoder
    if decoder is None:
        return _Pipeline(str, (SpaceJoined,))
    spec = json.loads(decoder.__getstate__())
    specs = _flatten(spec)
    mapped, rest = _leading_maps(specs)
    core = rest[0]["type"] if rest else ""
    return _Pipeline(_piece_function(mapped, core), tuple(_factories(rest)))


def _flatten(spec: dict[str, Any]) -> list[dict[str, Any]]:
    if spec["type"] != "Sequence":
        return [spec]
    return [inner for part in spec["decoders"] for inner in _flatten(part)]


def _leading_maps(specs: list[dict[str, Any]]) -> tuple[list[Callable[[str], str]], list[dict[str, Any]]]:
    """The decoders at the front that treat each token alone: applied once per token id, not once per token."""
    count = 0
    while count < len(specs) and specs[count]["type"] in ("Replace", "Strip"):
        count += 1
    return [_map_of(spec) for spec in specs[:count]], specs[count:]


def _piece_function(maps: list[Callable[[str], str]], core: str) -> Callable[[str], Piece]:
    to_bytes = {"ByteLevel": _byte_level_piece, "ByteFallback": _byte_fallback_piece}.get(core)

    def to_piece(content: str) -> Piece:
        for function in maps:
            content = function(content)
        return to_bytes(content) if to_bytes else content

    return to_piece


def _factories(specs: list[dict[str, Any]]) -> Iterable[StageFactory]:
    """One factory per stage. Fuse makes one piece of all: it needs no stage, but changes what follows it."""
    is_fused = False
    for position, spec in enumerate(specs):
        kind = spec["type"]
        if kind in ("ByteLevel", "ByteFallback") and position:
            raise ConfigError(f"tokenizer: decoder {kind} after {specs[position - 1]['type']} is not supported")
        if kind != "Fuse":
            yield _fused_factory(spec) if is_fused else _factory(spec)
        is_fused = is_fused or kind in ("Fuse", "ByteLevel")


def _factory(spec: dict[str, Any]) -> StageFactory:
    match spec["type"]:
        case "ByteLevel":
            return lambda begins: Utf8Bytes()
        case "ByteFallback":
            return lambda begins: ByteRuns()
        case "Replace" | "Strip":
            function = _map_of(spec)
            return lambda begins: Mapped(function)
        case "Metaspace":
            strips = spec.get("prepend_scheme", "always") != "never"
            return lambda begins: MetaspaceWords(spec["replacement"], strips and begins)
        case "WordPiece":
            return lambda begins: WordPieces(spec["prefix"], spec["cleanup"], begins)
        case "BPEDecoder":
            return lambda begins: SuffixedWords(spec["suffix"])
        case kind:
            raise ConfigError(f"tokenizer: decoder {kind} is not supported")


def _fused_factory(spec: dict[str, Any]) -> StageFactory:
    """Stages that see the whole text as one piece: only those whose effect does not reach over several characters."""
    match spec:
        case {"type": "Strip", "content": content, "start": start, "stop": stop}:
            return lambda begins: FusedStrip(content, start if begins else 0, stop)
        case {"type": "Replace", "pattern": {"String": pattern}} if len(pattern) == 1:
            function = _map_of(spec)
            return lambda begins: Mapped(function)
    raise ConfigError(f"tokenizer: decoder {spec['type']} after Fuse is not supported")


def _map_of(spec: dict[str, Any]) -> Callable[[str], str]:
    """A decoder that treats each piece alone."""
    if spec["type"] == "Strip":  # the library's own panics on pieces shorter than what it may strip
        return partial(strip, content=spec["content"], start=spec["start"], stop=spec["stop"])
    (kind, pattern), *_ = spec["pattern"].items()
    decoder = decoders.Replace(tokenizers.Regex(pattern) if kind == "Regex" else pattern, spec["content"])
    return lambda piece: decoder.decode([piece])


# ---------------------------------------------------------------- token strings that stand for bytes


def _byte_alphabet() -> dict[str, int]:
    """The characters that byte-level vocabularies write for bytes: printable Latin-1 stands for itself, the other
    bytes in ascending order for U+0100 and on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + rank): byte for rank, byte in enumerate(others)}


BYTE_OF_CHARACTER = _byte_alphabet()


def _byte_level_piece(content: str) -> Piece:
    """The bytes of a token; a token with any character outside the alphabet (an added one) is plain text."""
    try:
        return bytes(BYTE_OF_CHARACTER[character] for character in content)
    except KeyError:
        return content.encode()


def _byte_fallback_piece(content: str) -> Piece:
    match = BYTE_TOKEN.fullmatch(content)
    return bytes((int(match[1], 16),)) if match else content
