"""The command line as a user meets it: help, exit codes, one-line errors."""

import json
import subprocess
import sys
import time

import pytest

from nanosprint import cli


def test_help_needs_no_torch_and_is_instant():
    code = "import sys; sys.modules['torch'] = None; sys.argv = ['nanosprint', '--help']; import nanosprint.__main__"
    start = time.monotonic()
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "train" in result.stdout
    assert time.monotonic() - start < 20  # a guard against importing the world, not a benchmark


@pytest.mark.parametrize("command", sorted(cli.cli.commands))
def test_every_command_explains_itself(command, nanosprint):
    result = nanosprint(command, "--help")
    assert result.returncode == 0
    assert result.stdout.startswith("Usage: ")


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["train", "tinny"], 2, "unknown recipe 'tinny': did you mean 'tiny'?"),
        (["train", "tiny", "model.dmi=3"], 2, "unknown key 'model.dmi': did you mean 'model.dim'?"),
        (["train", "tiny", "exec.devce=cpu"], 2, "unknown key 'exec.devce': did you mean 'exec.device'?"),
        (["train", "tiny", "exec.compile=yes"], 2, "exec.compile='yes': expected one of auto, off, default"),
        (["train", "tiny", "model.dim"], 2, "override 'model.dim' is not of the form key.sub=value"),
        (["train", "tiny", "--budget", "60"], 2, "budget '60': expected a positive time such as 60s"),
        (["train", "tiny", "--max-steps", "0"], 2, "0 is not in the range x>=1"),
        (["train", "tiny", "--data", "nowhere"], 2, "nowhere"),
        (["train", "gpt2"], 2, "nanosprint data download fineweb10B"),
        (["resume", "nowhere"], 2, "nowhere is not a run directory"),
        (["sample", "nowhere"], 2, "nowhere is not a run directory"),
        (["plot", "nowhere"], 2, "nowhere is not a run directory"),
        (["recipes", "show", "tinny"], 2, "did you mean 'tiny'"),
        (["check"], 2, "give a RECIPE, or --all"),
        (["check", "tiny", "groups.0.role=matrx"], 2, "no group for parameters of role 'matrix.qkv'"),
        (["data", "info", "nowhere"], 2, "nowhere"),
        (["data", "prepare", "nowhere.txt", "--out", "d"], 2, "nowhere.txt"),
        (["data", "download", "fineweb"], 2, "unknown data set 'fineweb'"),
        (["train"], 2, "Missing argument 'RECIPE'"),
        (["frobnicate"], 2, "No such command 'frobnicate'"),
    ],
)
def test_mistakes_are_one_line(words, code, message, nanosprint):
    result = nanosprint(*words)
    assert message in result.stderr
    assert result.returncode == code
    assert "Traceback" not in result.stderr


def test_debug_shows_the_traceback(nanosprint):
    result = nanosprint("--debug", "train", "tinny")
    assert result.returncode == 2
    assert "Traceback" in result.stderr
    assert "error: unknown recipe" in result.stderr


def test_a_fault_of_ours_is_not_hidden(monkeypatch):
    def broken():
        raise AssertionError("ours")

    with pytest.raises(AssertionError):
        cli.guarded(broken)


def test_disk_errors_are_failures_not_usage():
    def full():
        raise OSError(28, "No space left on device")

    assert cli.guarded(full) == 1


def test_recipes_show_and_diff(nanosprint):
    shown = json.loads(nanosprint("recipes", "show", "tiny", "model.dim=64").stdout)
    assert shown["model"]["dim"] == 64
    assert len(shown["hash"]) == 12
    listed = nanosprint("recipes", "list").stdout
    assert {line.split()[0] for line in listed.splitlines()} >= {"tiny", "gpt2", "shakespeare"}
    difference = nanosprint("recipes", "diff", "tiny", "gpt2").stdout
    assert 'model.norm: "rms" -> "layernorm"' in difference


def test_check_all_recipes(nanosprint):
    result = nanosprint("check", "--all")
    assert result.returncode == 0, result.stderr
    assert all(": ok  " in line for line in result.stdout.splitlines())
    assert "gpt2: ok  124,439,808 parameters" in result.stdout


def test_train_sample_plot_and_data(nanosprint, tmp_path):
    trained = nanosprint("train", "tiny", "--out", "run", "--device", "cpu", "--profile")
    assert trained.returncode == 0, trained.stderr
    assert "validation loss" in trained.stdout
    assert "run: run" in trained.stdout
    assert "matrix products" in (tmp_path / "run/profile/table.txt").read_text()
    assert (tmp_path / "run/profile/trace.json.gz").stat().st_size > 0
    sampled = [nanosprint("sample", "run", "--tokens", 40, "--prompt", "To be", "--seed", s).stdout for s in (1, 1, 2)]
    assert sampled[0] == sampled[1] != sampled[2]
    assert sampled[0].startswith("To be")
    assert nanosprint("plot", "run", "--x", "tokens", "--out", "loss.svg").returncode == 0
    assert "<svg" in (tmp_path / "loss.svg").read_text()
    info = nanosprint("data", "info", "data/tiny")
    assert info.returncode == 0, info.stderr
    assert "bytes" in info.stdout


def test_without_out_a_run_goes_to_runs(nanosprint, tmp_path):
    assert nanosprint("train", "tiny", "--device", "cpu", "--max-steps", 1).returncode == 0
    (made,) = (tmp_path / "runs").iterdir()
    assert made.name.endswith("-tiny")


def test_budget_in_tokens_and_in_seconds(nanosprint, tmp_path):
    def recipe(run):
        return json.loads((tmp_path / run / "run.json").read_text())["recipe"]

    result = nanosprint("train", "tiny", "--out", "a", "--device", "cpu", "--budget", "5K")
    assert result.returncode == 0, result.stderr
    assert recipe("a")["train"]["num_steps"] == 5_000 // 512
    assert recipe("a")["schedule"]["momentum"]["warmup_steps"] == round(10 * 9 / 20)
    result = nanosprint("train", "tiny", "--out", "b", "--device", "cpu", "--budget", "2s", "data.epochs=10000")
    assert result.returncode == 0, result.stderr
    steps = recipe("b")["train"]["num_steps"]
    record = json.loads((tmp_path / "b" / "record.json").read_text())
    assert record["steps"] == steps
    assert 500 < record["train_ms"] < 8000  # calibrated on a machine that others use, too
    result = nanosprint("train", "tiny", "--out", "c", "--device", "cpu", "--budget", "0.1K")
    assert result.returncode == 2
    assert "less than one step of 512 tokens" in result.stderr


def test_a_prompt_with_unknown_characters(nanosprint, tmp_path):
    (tmp_path / "text.txt").write_text("abcabc abc\n" * 500)
    made = nanosprint("data", "prepare", "text.txt", "--tokenizer", "chars", "--out", "set", "--val-tokens", 200)
    assert made.returncode == 0, made.stderr
    words = ("tiny", "data.tokenizer=chars", "model.vocab_size=5", "eval.tokens=100", "data.epochs=10")
    trained = nanosprint("train", *words, "--data", "set", "--out", "run", "--device", "cpu", "--max-steps", 2)
    assert trained.returncode == 0, trained.stderr
    result = nanosprint("sample", "run", "--prompt", "abz")
    assert result.returncode == 2
    assert "'z'" in result.stderr
    small = nanosprint("train", "tiny", "data.tokenizer=chars", "model.vocab_size=3", "--data", "set", "--out", "x")
    assert small.returncode == 2
    assert "set model.vocab_size=5" in small.stderr
