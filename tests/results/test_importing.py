"""Others' logs as runs: small logs in their formats, written here."""

import math

import pytest

from nanosprint.results import RunRecord, plot_runs
from nanosprint.results.curves import load_curves
from nanosprint.results.importing import import_logs, read_log
from nanosprint.results.leaderboard import leaderboard
from nanosprint.training.request import load_request

SOURCE = 'import torch\nprint(f"step:{step}/{steps} val_loss:{loss:.4f}")  # <script> & co\n'
MODDED = (
    SOURCE
    + "=" * 100
    + """
Running Python 3.12.7 and PyTorch 2.6
step:0/20 val_loss:10.8258 train_time:0ms step_avg:nanms
step:1/20 train_time:95ms step_avg:95.00ms
step:2/20 train_loss:9.5012 train_time:190ms step_avg:95.00ms
step:10/20 val_loss:6.1234 train_time:951ms step_avg:95.10ms
step:20/20 val_loss:5.0125 train_time:1899.5ms step_avg:94.98ms
peak memory allocated: 31000 MiB
"""
)
LLM_C = """s:0 tel:11.0143
s:0 eval:0.2471
s:1 trl:11.0098 lr:1.2e-06 norm:15.34
s:2 trl:10.9001 lr:2.4e-06 norm:14.90
s:2 tel:10.8800
s:1 trl:11.0050 lr:1.2e-06 norm:15.30
s:2 trl:10.8000 lr:2.4e-06 norm:14.00
s:2 tel:10.7000
s:2 eval:0.2502
"""


@pytest.fixture
def logs(tmp_path):
    folder = tmp_path / "062526_Fast<er>"
    folder.mkdir()
    modded = folder / "0f0e0d0c-1111-4222-8333-0123456789ab.txt"
    modded.write_text(MODDED)
    llm_c = tmp_path / "main.log"
    llm_c.write_text(LLM_C)
    return modded, llm_c


def test_modded_nanogpt(logs, tmp_path):
    (run,) = import_logs(logs[:1], tmp_path / "run", batch_tokens=1000)
    assert run.path == tmp_path / "run"
    assert run.read_metrics() == [
        {"kind": "val", "step": 0, "loss": 10.8258, "train_ms": 0.0, "tokens": 0},
        {"kind": "train", "step": 2, "loss": 9.5012, "train_ms": 190.0, "tokens": 2000},
        {"kind": "val", "step": 10, "loss": 6.1234, "train_ms": 951.0, "tokens": 10000},
        {"kind": "val", "step": 20, "loss": 5.0125, "train_ms": 1899.5, "tokens": 20000},
    ]
    request = run.read_request()
    assert request["recipe"]["name"] == "062526_Fast<er>"  # the file's own name is a UUID
    assert (request["imported"]["format"], request["imported"]["num_steps"]) == ("modded-nanogpt", 20)
    assert (run.path / "source.txt").read_text() == SOURCE.strip()


def test_llm_c_with_steps_taken_again(logs, tmp_path):
    (run,) = import_logs(logs[1:], tmp_path / "run", name="gpt2 in C")
    curves = load_curves(run, "step")
    assert (curves.val.x, curves.val.y) == ([0, 2], [11.0143, 10.7])
    assert (curves.train.x, curves.train.y) == ([1, 2], [11.005, 10.8])
    with pytest.raises(ValueError, match="has no 'train_ms', which x='seconds' needs"):
        load_curves(run, "seconds")
    with pytest.raises(ValueError, match="has no 'tokens', which x='tokens' needs"):
        load_curves(run, "tokens")


def test_they_are_drawn_and_listed_beside_each_other(logs, tmp_path):
    runs = import_logs(logs, tmp_path / "others", devices="8 x NVIDIA H100")
    assert len({run.name for run in runs}) == 2
    plot_runs(runs, tmp_path / "x.svg")
    (board,) = leaderboard([tmp_path / "others"]).boards
    assert [(e.rank, round(e.loss, 4)) for e in board.entries] == [(1, 5.0125), (2, 10.7)]
    assert board.entries[0].mean("train_s") == 1.8995
    assert board.entries[1].mean("train_s") is None
    assert {e.first.devices for e in board.entries} == {"8 x NVIDIA H100"}


def test_runs_of_one_script_are_one_entry(logs, tmp_path):
    again = logs[0].with_name("again.txt")
    again.write_text(MODDED.replace("5.0125", "5.0325"))
    import_logs([logs[0], again], tmp_path / "others")
    (board,) = leaderboard([tmp_path / "others"], target=5.1).boards
    (entry,) = board.entries
    assert len(entry.results) == 2
    assert entry.p == pytest.approx(0.5 - math.atan(7.75) / math.pi)  # t = -0.0775 / 0.01, one degree of freedom
    assert "not below 0.01" in entry.note


def test_no_evidence_is_made_of_them(logs, tmp_path):
    (run,) = import_logs(logs[:1], tmp_path / "run")
    for use in (RunRecord.load, lambda run: RunRecord.load(run.path), load_request):
        with pytest.raises(ValueError, match=r"was imported from 0f0e0d0c.*\.txt: .*not verified, resumed or sampled"):
            use(run)


def test_bad_logs(tmp_path, logs):
    with pytest.raises(ValueError, match=r"none\.log does not exist"):
        read_log(tmp_path / "none.log")
    with pytest.raises(ValueError, match="is a folder"):
        read_log(tmp_path)
    (tmp_path / "a.txt").write_text("step 1: loss 3.0\n")
    with pytest.raises(ValueError, match=r"a\.txt holds no loss in a format known here"):
        import_logs([logs[0], tmp_path / "a.txt"], tmp_path / "out")
    assert not (tmp_path / "out").exists()
    import_logs(logs[:1], tmp_path / "run")
    with pytest.raises(ValueError, match="already holds a run"):
        import_logs(logs[:1], tmp_path / "run")


def test_command(logs, nanosprint):
    done = nanosprint("import", *logs, "--out", "others", "--batch-tokens", 524288)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("imported: others/") == 2
    done = nanosprint("resume", done.stdout.split("imported: ")[1].strip())
    assert done.returncode == 2
    assert "was imported from" in done.stderr


def test_verify_refuses_them_by_name(logs, nanosprint):
    nanosprint("import", *logs, "--out", "others")
    done = nanosprint("verify", "others")
    assert done.returncode == 1
    assert "refused (readable)" in done.stdout
    assert "was imported from" in " ".join(done.stdout.split())
