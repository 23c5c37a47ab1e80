"""Filling rows with documents from their first token on (speedrun records #26 and #29).

A row of S tokens, whose last target is one token more, takes documents one after the other until it has S + 1 tokens.
Each is cut at `max_document`, and the one that overflows the row is cut there. What is cut off is never read: the next
row begins with the next document. So every piece starts with its document's first token, and a row is made of whole
documents but for those ends.

The rows are cut on paper from the places of the start tokens alone, so that every process can work out all of them and
read only its own. Finding those places takes about 0.2 s for 1e9 tokens in the page cache; it is done as far as needed.
"""

from dataclasses import dataclass

import numpy as np

_CHUNK = 1 << 20  # tokens looked at in one go: they and the comparison's result fit into a processor's cache


@dataclass(frozen=True)
class Pieces:
    """Pieces of documents of one shard, in order; row i is made of pieces rows[i] .. rows[i + 1] - 1.

    offsets: (P,) int64, where each begins. lengths: (P,) int64, tokens of each.
    """

    offsets: np.ndarray
    lengths: np.ndarray
    rows: np.ndarray  # (number of rows + 1,) int64

    def part(self, first: int, count: int) -> "Pieces":
        """Rows first .. first + count - 1."""
        rows = self.rows[first : first + count + 1]
        here = slice(rows[0], rows[-1])
        return Pieces(self.offsets[here], self.lengths[here], rows - rows[0])

    @property
    def end(self) -> int:
        """The place behind the last piece. No document starts between a piece's first token and its end."""
        return int(self.offsets[-1] + self.lengths[-1])


class DocumentStarts:
    """The places of the start token in a shard, from `begin` on; looks no further than it is asked to.

    places: (n,) int64, those found so far. scanned: all before it are found.
    """

    def __init__(self, tokens: np.ndarray, start: int, begin: int = 0) -> None:
        self.tokens, self.start, self.begin = tokens, start, begin
        self.places = np.empty(0, np.int64)
        self.scanned = begin

    @property
    def complete(self) -> bool:
        return self.scanned >= len(self.tokens)

    def scan(self, upto: int) -> None:
        """Find all places before `upto`, and some more: at least one chunk is looked at where any is left."""
        found = [self.places]
        while not self.complete:
            stop = min(self.scanned + _CHUNK, len(self.tokens))
            found.append(self.scanned + np.flatnonzero(self.tokens[self.scanned : stop] == self.start))
            self.scanned = stop
            if stop >= upto:
                break
        self.places = np.concatenate(found)

    def forget(self, before: int) -> None:
        """Drop the places before `before`, which nobody will ask for again."""
        self.places = self.places[np.searchsorted(self.places, before) :]
        self.begin = max(self.begin, before)


def pack(starts: DocumentStarts, at: int, rows: int, seq_len: int, max_document: int | None) -> Pieces | None:
    """`rows` rows of seq_len + 1 tokens from the documents that start at `at` or later; None if the shard has too few.

    max_document: tokens of the longest piece; None leaves documents whole.
    """
    need = seq_len + 1
    starts.scan(at + rows * need)  # rows take no fewer tokens than that
    while (pieces := _pack_known(starts, at, rows, need, max_document)) is None and not starts.complete:
        starts.scan(starts.scanned + 1)
    return pieces


def _pack_known(starts: DocumentStarts, at: int, rows: int, need: int, max_document: int | None) -> Pieces | None:
    """As `pack`, from the documents whose ends are known."""
    places = starts.places[np.searchsorted(starts.places, at) :]
    if starts.complete:
        places = np.append(places, len(starts.tokens))  # the end of the last document
    lengths = np.minimum(np.diff(places), need if max_document is None else min(max_document, need))
    before = np.concatenate([[0], np.cumsum(lengths)])  # tokens in front of each document if none were cut at row ends
    borders, last = [0], []
    for _ in range(rows):
        filled = before[borders[-1]] + need
        stop = int(np.searchsorted(before, filled))  # the first border of documents at which the row has enough
        if stop == len(before):
            return None
        borders.append(stop)
        last.append(filled - before[stop - 1])
    lengths = lengths[: borders[-1]]
    lengths[np.array(borders[1:]) - 1] = last
    return Pieces(places[: borders[-1]], lengths, np.array(borders))
