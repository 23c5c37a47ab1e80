"""Batches split by rows: the same tokens, targets and documents, counted anew."""

import numpy as np
import pytest
import torch

from nanosprint.data.documents import DocumentEnds, document_ends
from nanosprint.data.loader import Batch
from nanosprint.ops.attention import Documents, check_documents
from nanosprint.training.batch import split_rows

START = 9


def packed(rows, seq_len, history=0):
    tokens = torch.from_numpy(np.random.default_rng(0).integers(START - 2, START + 1, (rows, history + seq_len)))
    ends = torch.empty(rows * seq_len + 1, dtype=torch.int32)
    longest = document_ends(tokens[:, history:].numpy(), START, ends.numpy())
    return Batch(tokens, tokens[:, history:] + 1, DocumentEnds(ends, longest))


@pytest.mark.parametrize(("rows", "parts"), [(6, 1), (6, 2), (6, 3), (6, 6), (1, 1)])
@pytest.mark.parametrize("history", [0, 3])
def test_parts_hold_whole_rows_and_their_documents(rows, parts, history):
    whole = packed(rows, 7, history)
    split = list(split_rows(whole, parts))
    assert len(split) == parts
    assert torch.equal(torch.cat([part.tokens for part in split]), whole.tokens)
    assert torch.equal(torch.cat([part.targets for part in split]), whole.targets)
    for part in split:
        own = torch.empty_like(whole.documents.ends)
        longest = document_ends(part.tokens[:, history:].numpy(), START, own.numpy())
        assert part.documents.ends.shape == whole.documents.ends.shape  # one graph
        assert part.documents.ends.unique().tolist() == own.unique().tolist()
        assert part.documents.longest >= longest
        check_documents(Documents(part.documents.ends, part.documents.longest), rows // parts, 7)


def test_without_documents():
    whole = packed(4, 5)._replace(documents=None)
    assert [part.documents for part in split_rows(whole, 2)] == [None, None]


def test_rows_that_cannot_be_shared():
    with pytest.raises(ValueError, match="6 rows cannot be split into 4 equal parts"):
        list(split_rows(packed(6, 7), 4))
