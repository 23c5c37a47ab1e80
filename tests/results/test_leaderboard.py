"""The leaderboard: which runs are one entry, how entries are ranked, what is left out and said."""

import dataclasses
import shutil

import pytest

from nanosprint.results import DataRecord, RunDir, RunRecord, ShardFile, encode_line, metrics_sha256
from nanosprint.results.leaderboard import leaderboard

FINEWEB = DataRecord(
    dir="d", files=(ShardFile(name="fineweb_val_000000.bin", tokens=101, sha256="c0ffee00"),), val_tokens=100
)
SHAKESPEARE = dataclasses.replace(FINEWEB, files=(ShardFile(name="shakespeare_val_0.bin", tokens=9, sha256="beef"),))


def make(path, loss, *, seconds=10.0, data=FINEWEB, name="fast", hash="f" * 12, seed=0, **changes):
    run = RunDir(path)
    path.mkdir(parents=True)
    run.write_request({"recipe": {"name": name}, "recipe_hash": hash})
    line = {"kind": "val", "step": 4, "tokens": 400, "train_ms": 1000 * seconds, "loss": loss}
    run.metrics_path.write_text(encode_line(line) + "\n")
    record = RunRecord(
        status="finished", recipe={"name": name}, recipe_hash=hash, execution={"device": "cuda"}, seed=seed,
        world_size=2, devices=({"name": "H200"}, {"name": "H200"}), versions={"torch": "2.11"}, commit="a" * 40,
        dirty=False, data=data, epochs=1.0, steps=4, tokens=400, train_ms=1000 * seconds, startup_ms=1.0,
        val_loss=loss, peak_memory_bytes=1, tokens_per_s=1.0, mfu=None, energy_j=50.0 * seconds, energy_reason=None,
        wait_fraction=0.0, metrics_sha256=metrics_sha256(run.metrics_path), series=None,
        created="2026-01-02T00:00:00+00:00",
    )  # fmt: skip
    dataclasses.replace(record, **changes).save(run)
    return run


def series(root, losses, **options):
    return [make(root / f"{options['hash']}-{i}", loss, seed=i, **options) for i, loss in enumerate(losses)]


BELOW = [3.270, 3.272, 3.271, 3.273]


def summary(board):
    return [(e.first.recipe_name, e.rank, e.note) for e in board.entries]


def test_ranks_follow_time_among_those_that_prove_the_target(tmp_path):
    series(tmp_path / "runs", BELOW, hash="slow", name="slow", seconds=30.0)
    series(tmp_path / "records", BELOW, hash="quick", name="quick", seconds=20.0)
    series(tmp_path / "runs", [3.2795, 3.2799, 3.2805, 3.2790], hash="near", name="near", seconds=5.0)
    series(tmp_path / "runs", [3.27], hash="single", name="single", seconds=4.0)
    series(tmp_path / "runs", [3.30, 3.31], hash="above", name="above", seconds=1.0)
    (board,) = leaderboard([tmp_path / "runs", tmp_path / "records"]).boards
    assert board.target == 3.28
    assert summary(board) == [
        ("quick", 1, ""),
        ("slow", 2, ""),
        ("single", None, "one run proves nothing"),
        ("near", None, f"p = {board.entries[3].p:.3f} is not below 0.01: more runs are needed"),
        ("above", None, "mean loss is above the target 3.28"),
    ]
    quick = board.entries[0]
    assert quick.loss == pytest.approx(3.2715)
    assert quick.loss_sd == pytest.approx(0.00129099, abs=1e-7)
    assert (quick.mean("train_s"), quick.mean("energy_j"), quick.first.devices) == (20.0, 1000.0, "2 x H200")
    (board,) = leaderboard([tmp_path / "runs", tmp_path / "records"], target=3.32, alpha=0.2).boards
    assert [e.first.recipe_name for e in board.entries if e.rank] == ["above", "near", "quick", "slow"]


def test_p_is_that_of_scipy(tmp_path):
    scipy_stats = pytest.importorskip("scipy.stats")
    series(tmp_path, BELOW, hash="a")
    (entry,) = leaderboard([tmp_path]).boards[0].entries
    assert entry.p == pytest.approx(scipy_stats.ttest_1samp(BELOW, 3.28, alternative="less").pvalue)


def test_other_data_is_another_board_ranked_by_loss(tmp_path):
    series(tmp_path, BELOW, hash="a")
    series(tmp_path, [1.42], hash="b", name="good", data=SHAKESPEARE, seconds=9.0)
    series(tmp_path, [1.47], hash="c", name="quick", data=SHAKESPEARE, seconds=1.0)
    fineweb, shakespeare = leaderboard([tmp_path]).boards
    assert fineweb.name == "fineweb, 100 validation targets (c0ffee00)"
    assert [e.rank for e in fineweb.entries] == [1]
    assert (shakespeare.target, summary(shakespeare)) == (None, [("good", 1, ""), ("quick", 2, "")])
    assert "mean validation loss" in shakespeare.rule


def test_another_execution_or_device_is_another_entry(tmp_path):
    make(tmp_path / "a", 3.27)
    make(tmp_path / "b", 3.27, execution={"device": "cuda", "fp8": "off"})
    make(tmp_path / "c", 3.27, devices=({"name": "H100"},))
    make(tmp_path / "d", 3.27, seed=1)
    (board,) = leaderboard([tmp_path]).boards
    assert sorted(len(e.results) for e in board.entries) == [1, 1, 2]


def test_unfinished_runs_are_counted_and_do_not_count(tmp_path):
    series(tmp_path, BELOW, hash="a")
    make(tmp_path / "x", None, hash="a", status="diverged")
    make(tmp_path / "y", 3.0, hash="a", status="stopped")
    (entry,) = leaderboard([tmp_path]).boards[0].entries
    assert (len(entry.results), entry.others) == (4, {"diverged": 1, "stopped": 1})
    assert entry.loss == pytest.approx(3.2715)


def test_what_cannot_be_trusted_is_left_out_and_said(tmp_path):
    series(tmp_path, BELOW, hash="a")
    edited = make(tmp_path / "edited", 3.2, hash="a")
    edited.metrics_path.write_text(edited.metrics_path.read_text().replace("3.2}", "3.1}"))
    RunDir(tmp_path / "going").path.mkdir()
    RunDir(tmp_path / "going").write_request({"recipe": {"name": "x"}})
    damaged = make(tmp_path / "damaged", 3.2)
    damaged.record_path.write_text("{")
    board = leaderboard([tmp_path])
    assert len(board.boards[0].entries[0].results) == 4
    reasons = {path.rsplit("/", 1)[1]: reason for path, reason in board.left_out}
    assert sorted(reasons) == ["damaged", "edited", "going"]
    assert "its checksum differs" in reasons["edited"]
    assert "no record yet" in reasons["going"]


def test_a_copy_is_not_counted_twice(tmp_path):
    """As where a race was published under records/ and is still in runs/."""
    series(tmp_path / "runs", BELOW[:2], hash="a")
    shutil.copytree(tmp_path / "runs", tmp_path / "records")
    board = leaderboard([tmp_path / "runs", tmp_path / "records"])
    assert len(board.boards[0].entries[0].results) == 2
    copy, original = tmp_path / "records" / "a-1", tmp_path / "runs" / "a-1"
    assert board.left_out[1] == (str(copy), f"{copy} is a copy of {original}")


def test_a_record_without_its_run_is_listed(tmp_path):
    run = make(tmp_path / "records" / "r", 3.27)
    run.request_path.unlink()
    run.metrics_path.unlink()
    assert len(leaderboard([tmp_path, tmp_path / "records"]).boards[0].entries[0].results) == 1  # and once


def test_bad_input(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="is not a folder"):
        leaderboard([tmp_path / "none"])
    with pytest.raises(ValueError, match="no finished run"):
        leaderboard([tmp_path])
    with pytest.raises(ValueError, match=r"alpha=2 must lie"):
        leaderboard([tmp_path], alpha=2)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="neither runs nor records here"):
        leaderboard()


def test_command(tmp_path, nanosprint, monkeypatch):
    series(tmp_path / "runs", BELOW, hash="a", name="[red]<b>&fast")
    series(tmp_path / "runs", [3.3], hash="b", name="slow")
    monkeypatch.setenv("COLUMNS", "200")
    done = nanosprint("leaderboard")
    assert done.returncode == 0, done.stderr
    assert "[red]<b>&fast a" in done.stdout
    assert "3.2715 ± 0.0013" in done.stdout
    assert "– slow (b): mean loss is above the target 3.28" in done.stdout
    assert "Ranked by mean training time" in done.stdout
    assert nanosprint("leaderboard", "nowhere").returncode == 2


def test_a_narrow_terminal_gets_two_tables_and_no_broken_words(tmp_path, nanosprint, monkeypatch):
    series(tmp_path / "runs", BELOW, hash="a")
    for width, tables in ((200, 1), (80, 2)):
        monkeypatch.setenv("COLUMNS", str(width))
        lines = nanosprint("leaderboard").stdout.splitlines()
        heads = [line.split() for line in lines if line.split()[:1] == ["rank"]]
        assert len(heads) == tables
        assert {"energy", "tokens", "devices", "commit"} <= {word for head in heads for word in head}
        assert any("3.2715 ± 0.0013" in line for line in lines)
