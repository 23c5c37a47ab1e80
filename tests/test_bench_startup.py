"""`bench_startup`: a row for cold and one for warm caches, from fresh processes; not compiled, so that it is short."""

import json
import sys

import pytest

from benchmarks import bench_startup


def test_two_rows(tmp_path, capsys, monkeypatch):
    out = tmp_path / "rows.jsonl"
    words = ["tiny", "exec.device=cpu", "exec.compile=off", "exec.threads=1", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["bench_startup", *words])
    bench_startup.main()
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["caches_were"] for row in rows] == ["cold", "warm"]
    for row in rows:
        assert {"import", "data", "resolve", "model", "warm-up"} == row["phases_s"].keys()
        assert 0 < row["phases_s"]["import"] < row["startup_s"]
        assert row["other_s"] == pytest.approx(row["phases_s"]["warm-up"])  # nothing was compiled
        assert (row["graphs"], row["compilers"]) == ([], 0)
    assert capsys.readouterr().out.count("ready after") == 2


def test_a_graphs_line():
    graph = {"tokens": 4096, "trained": True, "stored": False, "seconds": 5.0}
    row = {
        "startup_s": 9.0, "phases_s": {"import": 2.0, "warm-up": 7.0}, "other_s": 2.0, "compilers": 4,
        "graphs": [{**graph, "dynamo": 3.0, "aot": 1.0, "inductor": 0.5}],
        "caches": {"aot_autograd": {"hit": 1, "miss": 0, "bypass": 2}, "inductor": {"hit": 2, "miss": 0, "bypass": 0}},
    }  # fmt: skip
    shown = bench_startup.show("warm", row)
    assert "4,096 tokens, training, compiled: 5.0 s, of it dynamo 3.0  aot 1.0  inductor 0.5" in shown
    assert "aot_autograd 1 hit 0 miss 2 bypass, inductor 2 hit" in shown
