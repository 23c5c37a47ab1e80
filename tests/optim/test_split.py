import pytest
import torch
from torch import nn

from nanosprint.optim import AdamW, Muon, split_parameters


class GPT(nn.Module):
    """The usual shape of one; hidden size 32 equals the number of positions, to lay a trap."""

    def __init__(self, tied=False):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(50, 8), nn.Embedding(32, 8)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(8), "qkv": nn.Linear(8, 24), "up": nn.Linear(8, 32),
                           "down": nn.Linear(32, 8), "gate": nn.Linear(8, 1)})
            for _ in range(2)
        )  # fmt: skip
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.lm_head = nn.Linear(8, 50, bias=False)
        if tied:
            self.lm_head.weight = self.wte.weight


def names(pairs):
    return {name for name, _ in pairs}


def reason(split, name):
    return next(row.reason for row in split.rows if name in row.names)


def test_gpt():
    model = GPT()
    split = split_parameters(model)
    assert names(split.muon) == {f"blocks.{i}.{m}.weight" for i in range(2) for m in ("qkv", "up", "down")}
    assert names(split.muon) | names(split.adam) == names(model.named_parameters())
    assert not names(split.muon) & names(split.adam)
    assert reason(split, "lm_head.weight").startswith("output head")
    assert reason(split, "wpe.weight") == "embedding table"
    assert "single row" in reason(split, "blocks.0.gate.weight")
    assert "gain, bias or scalar" in reason(split, "scale")


def test_usable_as_it_is():
    model = GPT()
    split = split_parameters(model)
    optimizers = [Muon(split.muon, lr=0.02), AdamW(split.adam, lr=0.01)]
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    for optimizer in optimizers:
        optimizer.step()
    assert all(not torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_tied_parameters_count_once():
    model = GPT(tied=True)
    split = split_parameters(model)
    assert sum(p is model.wte.weight for _, p in split.adam) == 1
    assert "wte.weight = lm_head.weight" in split.explain()
    assert "tied to the head" in split.explain()
    total = sum(p.numel() for _, p in [*split.muon, *split.adam])
    assert total == sum(p.numel() for p in model.parameters())


def test_patterns_overrule():
    split = split_parameters(GPT(), adam=["*.qkv.*"], muon=["lm_head.weight"])
    assert "blocks.0.qkv.weight" in names(split.adam)
    assert "lm_head.weight" in names(split.muon)
    assert reason(split, "lm_head.weight") == "you said so: lm_head.weight"


def test_merged_matrices():
    split = split_parameters(GPT(), blocks={"*.qkv.weight": 3})
    groups = split.muon_groups()
    assert [(len(g["params"]), g["split"]) for g in groups] == [(4, 1), (2, 3)]
    assert "3 matrices in one" in reason(split, "blocks.0.qkv.weight")
    assert Muon(groups).param_groups[1]["split"] == 3
    attention = nn.ModuleList([nn.MultiheadAttention(8, 2)])
    assert [g["split"] for g in split_parameters(attention).muon_groups()] == [1, 3]


def test_frozen_parameters_are_in_neither():
    model = GPT()
    model.blocks[0]["up"].weight.requires_grad_(False)
    split = split_parameters(model)
    assert "blocks.0.up.weight" not in names(split.muon) | names(split.adam)
    assert "requires_grad is False" in split.explain()


def test_vocab_size_and_models_without_embedding():
    plain = nn.ModuleDict({"a": nn.Linear(4, 8), "b": nn.Linear(8, 10)})
    assert names(split_parameters(plain).muon) == {"a.weight", "b.weight"}
    assert names(split_parameters(plain, vocab_size=10).muon) == {"a.weight"}

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.fc, self.classifier = nn.Conv2d(3, 4, 3), nn.Linear(4, 8), nn.Linear(8, 10)

    split = split_parameters(Net())
    assert names(split.muon) == {"conv.weight", "fc.weight"}
    assert "flattened to 4x27" in reason(split, "conv.weight")
    assert "by its name" in reason(split, "classifier.weight")


def test_explain_is_a_table_with_totals():
    lines = split_parameters(GPT()).explain().splitlines()
    assert lines[0].split() == ["parameter", "shape", "for", "why"]
    assert any("muon: 6 tensors, 1,408 numbers" in line for line in lines)
    assert len(lines) == 1 + 24 + 2


def test_user_mistakes():
    model = GPT()
    with pytest.raises(ValueError, match="no parameter is called 'head'"):
        split_parameters(model, adam=["head"])
    with pytest.raises(ValueError, match=r"wte.weight is claimed by muon='wte\*' and adam='\*.weight'"):
        split_parameters(model, muon=["wte*"], adam=["*.weight"])
    with pytest.raises(ValueError, match=r"claims scale of shape \(\)"):
        split_parameters(model, muon=["scale"])
