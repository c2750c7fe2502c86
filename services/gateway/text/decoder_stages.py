"""The decoders of a `tokenizer.json`, as stages that are fed one piece at a time.

A tokenizer's `decode` turns a whole list of token strings into text. Each stage here does the same work
incrementally: what it has given out never has to be taken back, and the concatenation of everything that `push` and
`flush` returned equals what `decode` gives for the whole list. Text that a later token could still change is held.

A piece is one element of the decoder's list: a string, or bytes where the token stands for raw bytes.
"""

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

Piece = str | bytes

WORDPIECE_CLEANUP = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" do not", " don't"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)
"""What the WordPiece decoder does to each piece if `cleanup` is on."""


class Stage(Protocol):
    """One step of the pipeline, with the state of one stream."""

    def push(self, piece: Piece) -> Sequence[Piece]:
        """The pieces that are final once `piece` is known."""

    def flush(self) -> Sequence[Piece]:
        """What was held, now that no piece follows."""


def text_of(piece: Piece) -> str:
    """The string of a piece that no byte stage has consumed."""
    return piece if isinstance(piece, str) else piece.decode("utf-8", "replace")


class Utf8Bytes:
    """ByteLevel: all pieces are bytes of one UTF-8 text; each ill-formed part becomes one U+FFFD.

    The incremental decoder holds an unfinished sequence only, and replaces exactly the parts that a decoder of the
    whole text would replace (both follow the Unicode recommendation of maximal subparts).
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, piece: Piece) -> Sequence[Piece]:
        text = self._decoder.decode(piece if isinstance(piece, bytes) else piece.encode())
        return (text,) if text else ()

    def flush(self) -> Sequence[Piece]:
        return (self._decoder.decode(b"", True),)


class ByteRuns:
    """ByteFallback: a run of byte pieces is text if the whole run is well-formed, else one U+FFFD per byte.

    A byte at the end of a run can thus spoil its beginning, so that a run is held until a piece of text ends it.
    """

    def __init__(self) -> None:
        self._run = bytearray()

    def push(self, piece: Piece) -> Sequence[Piece]:
        if isinstance(piece, bytes):
            self._run += piece
            return ()
        if not self._run:
            return (piece,)
        return (*self.flush(), piece)

    def flush(self) -> Sequence[Piece]:
        run, self._run = bytes(self._run), bytearray()
        if not run:
            return ()
        try:
            return (run.decode(),)
        except UnicodeDecodeError:
            return ("\N{REPLACEMENT CHARACTER}",) * len(run)


class Mapped:
    """A decoder that treats every piece alike."""

    def __init__(self, function: Callable[[str], str]) -> None:
        self._function = function

    def push(self, piece: Piece) -> Sequence[Piece]:
        return (self._function(text_of(piece)),)

    def flush(self) -> Sequence[Piece]:
        return ()


def strip(text: str, content: str, start: int, stop: int) -> str:
    """`text` without up to `start` characters `content` at its beginning and up to `stop` at its end."""
    text = text[_run_length(text, content, start) :]
    return text[: len(text) - _run_length(text[::-1], content, stop)]


def _run_length(text: str, content: str, limit: int) -> int:
    count = 0
    while count < min(limit, len(text)) and text[count] == content:
        count += 1
    return count


class FusedStrip:
    """Strip after Fuse: `strip` of the whole text. What could be stripped from the end is held."""

    def __init__(self, content: str, start: int, stop: int) -> None:
        self._content = content
        self._start = start
        self._stop = stop
        self._held = ""

    def push(self, piece: Piece) -> Sequence[Piece]:
        text = text_of(piece)
        if text and self._start:
            text = self._strip_start(text)
        text = self._held + text
        kept = len(text) - _run_length(text[::-1], self._content, self._stop) if self._stop else len(text)
        self._held = text[kept:]
        return (text[:kept],) if kept else ()

    def flush(self) -> Sequence[Piece]:
        return ()  # what is held is what is stripped

    def _strip_start(self, text: str) -> str:
        count = _run_length(text, self._content, self._start)
        self._start = 0 if count < len(text) else self._start - count
        return text[count:]


class MetaspaceWords:
    """Metaspace: the replacement character is a space, and nothing in the first piece."""

    def __init__(self, replacement: str, strip_first: bool) -> None:
        self._replacement = replacement
        self._strip_next = strip_first

    def push(self, piece: Piece) -> Sequence[Piece]:
        space = "" if self._strip_next else " "
        self._strip_next = False
        return (text_of(piece).replace(self._replacement, space),)

    def flush(self) -> Sequence[Piece]:
        return ()


class WordPieces:
    """WordPiece: a space before every piece but the first and those that continue a word."""

    def __init__(self, prefix: str, cleanup: bool, is_first: bool) -> None:
        self._prefix = prefix
        self._cleanup = cleanup
        self._is_first = is_first

    def push(self, piece: Piece) -> Sequence[Piece]:
        text = text_of(piece)
        if not self._is_first:
            text = text.removeprefix(self._prefix) if text.startswith(self._prefix) else f" {text}"
        self._is_first = False
        for pattern, replacement in WORDPIECE_CLEANUP if self._cleanup else ():
            text = text.replace(pattern, replacement)
        return (text,)

    def flush(self) -> Sequence[Piece]:
        return ()


class SuffixedWords:
    """BPEDecoder: the end-of-word suffix is a space, and nothing in the last piece; so the last piece is held."""

    def __init__(self, suffix: str) -> None:
        self._suffix = suffix
        self._held: str | None = None

    def push(self, piece: Piece) -> Sequence[Piece]:
        held, self._held = self._held, text_of(piece)
        return () if held is None else (held.replace(self._suffix, " "),)

    def flush(self) -> Sequence[Piece]:
        held, self._held = self._held, None
        return () if held is None else (held.replace(self._suffix, ""),)


class SpaceJoined:
    """No decoder at all: token strings with a space between them."""

    def __init__(self, is_first: bool) -> None:
        self._is_first = is_first

    def push(self, piece: Piece) -> Sequence[Piece]:
        separator = "" if self._is_first else " "
        self._is_first = False
        return (separator + text_of(piece),)

    def flush(self) -> Sequence[Piece]:
        return ()
