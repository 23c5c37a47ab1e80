"""Text to token ids and back: GPT-2's byte pairs, the characters of one corpus, or plain bytes.

A document starts with the tokenizer's BOS where it has one; `encode` never adds it, and text that merely looks like it
is ordinary text. Ids fit uint16. `tokenizer.json` beside the shards says which tokenizer made them, so that a trained
model can be given prompts.
"""

import base64
import codecs
import functools
import importlib.resources
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from nanosprint.extras import require
from nanosprint.files import atomic_write

Kind = Literal["gpt2", "chars", "bytes"]
KINDS: tuple[Kind, ...] = ("gpt2", "chars", "bytes")
FILE_NAME = "tokenizer.json"
END_OF_TEXT = "<|endoftext|>"  # how a BOS is shown in text, and the line that separates documents in a .txt file
GPT2_BOS = 50_256

# Equal to the published pattern of GPT-2, but its possessive quantifiers cannot overflow the stack of the regex engine
# on long runs of white space (the plain one does so on a million spaces).
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"


class Tokenizer(Protocol):
    """What training, sampling and `data prepare` need to know of a tokenizer."""

    kind: Kind
    vocab_size: int
    bos: int | None

    def encode(self, text: str) -> np.ndarray:
        """The ids of `text` without BOS: (n,) uint16. Raises ValueError for text it has no ids for."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; bytes that are not valid UTF-8 become U+FFFD."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """The UTF-8 bytes of one token, which may be part of a character."""
        ...

    def to_dict(self) -> dict[str, Any]:
        """The content of tokenizer.json."""
        ...


class GPT2Tokenizer:
    """Byte pairs of GPT-2 (Radford et al. 2019), 50,257 ids; tiktoken does the work, its ranks ship with us."""

    kind: Kind = "gpt2"
    vocab_size = 50_257
    bos: int | None = GPT2_BOS

    def __init__(self) -> None:
        self._encoding = _gpt2_encoding()

    def encode(self, text: str) -> np.ndarray:
        # Straight into a buffer: a third faster than the list that encode_ordinary makes, and outside the GIL.
        try:
            return self._encoding.encode_to_numpy(text, disallowed_special=()).astype(np.uint16)
        except UnicodeEncodeError as error:
            raise _lone_surrogate(text, error) from None

    def decode(self, ids: Iterable[int]) -> str:
        return _decode_bytes(self, ids)

    def token_bytes(self, token: int) -> bytes:
        _check_id(token, self)
        return self._encoding.decode_single_token_bytes(token)

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "vocab_size": self.vocab_size}


class BytesTokenizer:
    """One id per byte of UTF-8, and BOS 256."""

    kind: Kind = "bytes"
    vocab_size = 257
    bos: int | None = 256

    def encode(self, text: str) -> np.ndarray:
        try:
            return np.frombuffer(text.encode(), np.uint8).astype(np.uint16)
        except UnicodeEncodeError as error:
            raise _lone_surrogate(text, error) from None

    def decode(self, ids: Iterable[int]) -> str:
        return _decode_bytes(self, ids)

    def token_bytes(self, token: int) -> bytes:
        _check_id(token, self)
        return END_OF_TEXT.encode() if token == self.bos else bytes([token])

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "vocab_size": self.vocab_size}


class CharsTokenizer:
    """One id per distinct character of a corpus, in the order of their code points; no BOS."""

    kind: Kind = "chars"
    bos: int | None = None

    def __init__(self, chars: str) -> None:
        """chars: the vocabulary. Raises ValueError unless it is sorted, without repeats, and of 1 to 65,536."""
        if not 1 <= len(chars) <= 2**16:
            raise ValueError(f"a vocabulary of {len(chars)} characters, not 1 to 65,536: use the tokenizer bytes")
        if list(chars) != sorted(set(chars)):
            raise ValueError("the characters of the vocabulary are not sorted and distinct")
        self.chars = chars
        self.vocab_size = len(chars)
        self._code_points = _code_points(chars)
        self._ids = np.full(int(self._code_points[-1]) + 1, -1, np.int32)  # code point -> id
        self._ids[self._code_points] = np.arange(len(chars))

    def encode(self, text: str) -> np.ndarray:
        points = _code_points(text)
        ids = self._ids[np.minimum(points, len(self._ids) - 1)]
        unknown = (ids < 0) | (points >= len(self._ids))
        if unknown.any():
            char = text[int(unknown.argmax())]
            raise ValueError(
                f"character {char!r} (U+{ord(char):04X}) is not in the vocabulary of this model's data, "
                f"which has these {self.vocab_size}: {_shown(self.chars)}"
            )
        return ids.astype(np.uint16)

    def decode(self, ids: Iterable[int]) -> str:
        wanted = np.fromiter(ids, np.int64)
        if wanted.size and not 0 <= wanted.min() <= wanted.max() < self.vocab_size:
            _check_id(int(wanted.min() if wanted.min() < 0 else wanted.max()), self)
        return self._code_points[wanted].astype("<u4").tobytes().decode("utf-32-le", "surrogatepass")

    def token_bytes(self, token: int) -> bytes:
        _check_id(token, self)
        return self.chars[token].encode()

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "vocab_size": self.vocab_size, "chars": self.chars}


def from_dict(data: dict[str, Any]) -> Tokenizer:
    """The tokenizer that `to_dict` described. Raises ValueError for anything else."""
    kind = data.get("kind")
    if kind == "chars":
        if not isinstance(data.get("chars"), str):
            raise ValueError('a chars tokenizer needs its characters as text under "chars"')
        return CharsTokenizer(data["chars"])
    if kind == "gpt2":
        return GPT2Tokenizer()
    if kind == "bytes":
        return BytesTokenizer()
    raise ValueError(f"unknown tokenizer {kind!r}; the known ones are {', '.join(KINDS)}")


def load_tokenizer(folder: Path | None, kind: str | None = None) -> Tokenizer:
    """The tokenizer of a dataset folder, from its tokenizer.json, or by `kind` where the folder has none.

    Raises ValueError if the folder's tokenizer is of another kind, its file is damaged, or a chars vocabulary is needed
    and there is no file to take it from.
    """
    path = folder and folder / FILE_NAME
    if path and path.exists():
        data = _read_json(path)
        if kind is not None and data.get("kind") != kind:
            raise ValueError(f"{folder} was made with the tokenizer {data.get('kind')!r}, but {kind!r} is asked for")
        try:
            return from_dict(data)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
    if kind == "chars":
        raise ValueError(
            f"the characters of a chars tokenizer are in its dataset's {FILE_NAME}; {folder or 'no folder'} has none: "
            "make the dataset with `nanosprint data prepare ... --tokenizer chars`"
        )
    return from_dict({"kind": kind or "gpt2"})  # published token sets come without the file and are GPT-2's


def saved_kind(folder: Path) -> str | None:
    """The kind of tokenizer that made the dataset in `folder`, without loading it; None if the folder does not say."""
    path = folder / FILE_NAME
    return str(_read_json(path).get("kind")) if path.exists() else None


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json into a dataset folder, atomically."""
    atomic_write(folder / FILE_NAME, (json.dumps(tokenizer.to_dict()) + "\n").encode())


def stream_text(tokenizer: Tokenizer, ids: Iterable[int]) -> Iterator[str]:
    """The text of `ids` bit by bit, for a terminal: holds back the bytes of an unfinished character."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for token in ids:
        text = decoder.decode(tokenizer.token_bytes(int(token)))
        if text:
            yield text
    rest = decoder.decode(b"", final=True)
    if rest:
        yield rest


@functools.cache
def _gpt2_encoding() -> Any:
    tiktoken = require("tiktoken", extra="data", purpose="the tokenizer gpt2")
    lines = importlib.resources.files("nanosprint.data").joinpath("assets/gpt2.tiktoken").read_bytes().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines)}
    return tiktoken.Encoding(
        "gpt2", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens={END_OF_TEXT: GPT2_BOS}
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text("utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not valid JSON ({error}): prepare the dataset again") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path}: expected a JSON object: prepare the dataset again")
    return data


def _decode_bytes(tokenizer: Tokenizer, ids: Iterable[int]) -> str:
    return b"".join(tokenizer.token_bytes(int(token)) for token in ids).decode("utf-8", "replace")


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")


def _check_id(token: int, tokenizer: Tokenizer) -> None:
    if not 0 <= token < tokenizer.vocab_size:
        raise ValueError(
            f"token id {token} is outside the {tokenizer.vocab_size} ids of the tokenizer {tokenizer.kind}"
        )


def _lone_surrogate(text: str, error: UnicodeEncodeError) -> ValueError:
    return ValueError(f"text with half a surrogate pair, {text[error.start]!r}, which UTF-8 cannot hold: remove it")


def _shown(chars: str, limit: int = 200) -> str:
    return repr(chars) if len(chars) <= limit else f"{chars[:limit]!r} and {len(chars) - limit} more"
