"""Row-wise Adagrad against loops over look-ups in float64."""

import pytest
import torch
from torch import nn

from nanosprint.optim.row_adagrad import RowAdagrad


def textbook(table, lookups, lr, power, steps):
    """Every step: add each look-up's mean square to its row's sum, then move each look-up's row by its gradient."""
    sums = torch.zeros(len(table), dtype=torch.float64)
    for rows, grads in lookups[:steps]:
        for r, g in zip(rows, grads, strict=True):
            sums[r] += (g**2).mean()
        for r, g in zip(rows, grads, strict=True):
            if sums[r] > 0:
                table[r] -= lr * g / sums[r] ** power
    return table


@pytest.mark.parametrize("power", [0.5, 0.4, 0.0])
def test_against_loops(power):
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(6, 3, dtype=torch.float64, generator=generator)
    lookups = []
    for n in (4, 1, 7):  # rows repeat, and some are never looked up
        rows = torch.randint(5, (n,), generator=generator)
        lookups.append((rows.tolist(), torch.randn(n, 3, dtype=torch.float64, generator=generator)))
    table = nn.Parameter(start.clone())
    optimizer = RowAdagrad([table], lr=0.3, power=power)
    for rows, grads in lookups:
        table.grad = torch.sparse_coo_tensor(torch.tensor([rows]), grads, table.shape, check_invariants=True)
        optimizer.step()
    torch.testing.assert_close(table.detach(), textbook(start.clone(), lookups, 0.3, power, 3))
    assert torch.equal(table[5], start[5])


def test_lookups_in_blocks_give_what_all_at_once_give(monkeypatch):
    rows = torch.tensor([3, 0, 3, 3, 1, 0, 4])
    grads = torch.randn(7, 3, dtype=torch.float64)
    results = []
    for block in (100, 3):
        monkeypatch.setattr("nanosprint.optim.row_adagrad._CPU_BLOCK", block)
        table = nn.Parameter(torch.ones(6, 3, dtype=torch.float64))
        table.grad = torch.sparse_coo_tensor(rows[None], grads, table.shape, check_invariants=True)
        RowAdagrad([table], lr=0.3).step()
        results.append(table.detach())
    torch.testing.assert_close(*results, rtol=1e-15, atol=1e-15)


def test_an_embedding_learns():
    torch.manual_seed(0)
    table = nn.Embedding(50, 4, sparse=True)
    optimizer = RowAdagrad(table.parameters(), lr=0.5)
    targets = torch.randn(50, 4)
    ids = torch.arange(0, 50, 2)
    first = None
    for _ in range(200):
        optimizer.zero_grad()
        loss = (table(ids) - targets[ids]).square().mean()
        loss.backward()
        optimizer.step()
        first = first or loss.item()
    assert loss.item() < 1e-2 * first


def test_state_dict_round_trip_is_exact():
    def run(restart):
        torch.manual_seed(0)
        table = nn.Parameter(torch.randn(5, 2))
        optimizer = RowAdagrad([table], lr=0.1)
        for step in range(4):
            if restart and step == 2:
                fresh = RowAdagrad([table], lr=9.0)
                fresh.load_state_dict(optimizer.state_dict())
                optimizer = fresh
            grads = torch.randn(3, 2, generator=torch.Generator().manual_seed(step))
            table.grad = torch.sparse_coo_tensor(
                torch.tensor([[0, step, 0]]), grads, table.shape, check_invariants=True
            )
            optimizer.step()
        return table.detach()

    assert torch.equal(run(False), run(True))


def test_zero_gradient_moves_nothing():
    table = nn.Parameter(torch.ones(3, 2))
    optimizer = RowAdagrad([table])
    table.grad = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.zeros(1, 2), table.shape, check_invariants=True)
    optimizer.step()
    assert torch.equal(table, torch.ones(3, 2))


def test_bad_input():
    table = nn.Parameter(torch.ones(3, 2))
    with pytest.raises(ValueError, match="power=2 must lie between 0 and 1"):
        RowAdagrad([table], power=2)
    with pytest.raises(ValueError, match="knows no weight_decay"):
        RowAdagrad([table], weight_decay=0.1)
    with pytest.raises(ValueError, match=r"shape \(3,\) is not a table"):
        RowAdagrad([nn.Parameter(torch.ones(3))])
    optimizer = RowAdagrad([table])
    table.grad = torch.ones(3, 2)
    with pytest.raises(ValueError, match=r"dense gradient for a table of shape \(3, 2\): look it up with sparse=True"):
        optimizer.step()
