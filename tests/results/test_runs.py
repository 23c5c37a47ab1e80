"""The run directory: names, claims, damage."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from nanosprint.results import RunDir, Series, claim_run_dir, new_run_dir


def test_name_carries_time_and_recipe(tmp_path):
    before = time.strftime("%Y%m%d-%H%M%S")
    run = new_run_dir(tmp_path / "deep" / "runs", "tiny")
    stamp, _, recipe = run.name.rpartition("-")
    assert before <= stamp <= time.strftime("%Y%m%d-%H%M%S")
    assert recipe == "tiny"
    assert run.path.is_dir()


def test_a_recipe_name_cannot_leave_the_root(tmp_path):
    run = new_run_dir(tmp_path, "../../my recipe")
    assert run.path.parent == tmp_path
    assert run.name.endswith("-..-..-my-recipe")


def test_many_in_one_second_are_unique(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "strftime", lambda *_: "20260101-000000")
    with ThreadPoolExecutor(8) as pool:
        runs = list(pool.map(lambda _: new_run_dir(tmp_path, "tiny"), range(20)))
    assert len({run.path for run in runs}) == 20
    assert sorted(p.name for p in tmp_path.iterdir())[:2] == ["20260101-000000-tiny", "20260101-000000-tiny-10"]


def test_out_is_claimed_once(tmp_path):
    out = tmp_path / "a" / "b"
    run = claim_run_dir(out)
    assert run.path == out
    assert not run.has_run
    claim_run_dir(out)  # still empty
    run.write_request({"seed": 1})
    with pytest.raises(ValueError, match=r"already holds a run: choose another folder, or .*nanosprint resume"):
        claim_run_dir(out)
    run.request_path.unlink()
    run.metrics_path.touch()
    with pytest.raises(ValueError, match=r"holds metrics\.jsonl of a run whose run\.json is gone"):
        claim_run_dir(out)


def test_out_that_is_a_file(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ValueError, match="a file of that name is in the way"):
            claim_run_dir(path)


def test_request_and_environment_round_trip(tmp_path):
    run = RunDir(tmp_path)
    run.write_request({"recipe": {"name": "tiny", "betas": (0.9, 0.95)}, "seed": 1})
    run.write_environment({"cpu": {"name": "ü"}})
    assert run.read_request() == {"recipe": {"name": "tiny", "betas": [0.9, 0.95]}, "seed": 1}
    assert run.read_environment() == {"cpu": {"name": "ü"}}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["environment.json", "run.json"]


def test_crash_while_rewriting_keeps_the_request(tmp_path, monkeypatch):
    run = RunDir(tmp_path)
    run.write_request({"seed": 1})

    def crash(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(OSError, match="Input/output"):
        run.write_request({"seed": 2})
    assert run.read_request() == {"seed": 1}


def test_what_is_no_run_directory(tmp_path):
    with pytest.raises(ValueError, match="not a run directory: there is no such folder"):
        RunDir(tmp_path / "no").read_request()
    with pytest.raises(ValueError, match=r"not a run directory: it holds no run\.json"):
        RunDir(tmp_path).read_metrics()


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('{"seed": 1,\n "x": }', "run.json is damaged at line 2, column 7"),
        ('{"seed"', "run.json is damaged at line 1, column 8"),
        ("", "run.json is damaged at line 1, column 1"),
        ("[1, 2]", "run.json is damaged: expected a JSON object, found list"),
    ],
)
def test_damaged_json_names_file_and_place(tmp_path, text, place):
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(ValueError, match=place):
        RunDir(tmp_path).read_request()
    (tmp_path / "run.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ValueError, match=r"run\.json is damaged at byte 7: not UTF-8"):
        RunDir(tmp_path).read_request()


def test_series_index_is_checked():
    assert Series(id="a", index=1, size=2).size == 2
    with pytest.raises(ValueError, match=r"series\.index=2 must lie between 0 and"):
        Series(id="a", index=2, size=2)


def test_results_import_neither_torch_nor_numpy():
    code = (
        "import sys, nanosprint.results\n"
        "bad = {'torch', 'numpy', 'matplotlib', 'rich'} & sys.modules.keys()\n"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
