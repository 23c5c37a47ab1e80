"""Muon's options in whole runs: they change the result, are warmed up without a trace and resumed bit for bit."""

from dataclasses import replace

import pytest
import torch

from nanosprint.results.runs import RunDir
from nanosprint.training import setup
from nanosprint.training.api import carry_out
from nanosprint.training.request import load_request, save_request

WORDS = {
    "lookahead": 'groups.0.rule.lookahead={"decay": 0.8}',
    "radius": "groups.0.rule.radius={}",
    "basis": 'groups.0.rule.basis={"refresh_every": 4}',
    "mixture": 'groups.0.rule.mixture={"count": 4, "start": 5, "end": 2, "longest": 20}',
}


def same(one, other):
    return all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("option", WORDS)
def test_resumed_and_warmed_up(train_tiny, weights, monkeypatch, option):
    words = (WORDS[option], "train.checkpoint_every=9")
    whole, path = train_tiny("whole", *words), train_tiny("parts", *words, max_steps=9)
    (path / "record.json").unlink()
    request = replace(load_request(RunDir(path)), max_steps=None)
    save_request(RunDir(path), request)
    carry_out(request, RunDir(path), resume=True)
    assert same(weights(path), weights(whole))
    assert not same(weights(whole), weights(train_tiny("plain")))
    monkeypatch.setattr(setup, "warm_up", lambda *_, **__: None)
    assert same(weights(whole), weights(train_tiny("without", *words)))
