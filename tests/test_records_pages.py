"""Published races: what is copied and what goes, that the copies still verify, and the pages made of them."""

import json
import shutil
from pathlib import Path

import pytest

from benchmarks import records
from nanosprint.config import Execution
from nanosprint.evidence.ablate import without_each
from nanosprint.evidence.race import carry_on, start
from nanosprint.evidence.series import load_race, plan_race
from nanosprint.results.record import RunRecord
from nanosprint.results.runs import RunDir
from nanosprint.results.verify import verify
from nanosprint.training.api import carry_out
from nanosprint.training.request import load_request

ROOT = Path(records.__file__).resolve().parents[1]
SHORT = {"train.num_steps": "4", "eval.tokens": "512", "eval.every": "2"}


@pytest.fixture(scope="module")
def ablation_once(tiny_data, tmp_path_factory):
    """A finished ablation of two runs each, carried out in this process."""
    variants, left_out = without_each("tiny", SHORT, ("rotary",), everything=False)
    options = {
        "baseline": "tiny",
        "left_out": left_out,
        "target": 9.0,
        "command": ("/home/me/bin/nanosprint", "ablate"),
    }
    cpu = Execution(device="cpu")
    race = plan_race(variants, runs=2, first_seed=1, execution=cpu, data=str(tiny_data), **options)
    folder = start(race, tmp_path_factory.mktemp("races") / "ablation")

    def train(self, path, **_):
        carry_out(load_request(RunDir(path)), RunDir(path), resume=True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nanosprint.evidence.jobs.Runner.train", train)
        carry_on(folder, print)
    return folder


@pytest.fixture
def ablation(ablation_once, tmp_path):
    return shutil.copytree(ablation_once, tmp_path / "ablation")


def tell_of_the_machine(run):
    """A GPU's serial number and a message with a path, as a run on a GPU has them, sealed as the program does."""
    raw = json.loads(run.record_path.read_text())
    raw["devices"] = [{"name": "a GPU", "uuid": "GPU-1234"}]
    *lines, _ = run.metrics_path.read_text().splitlines(keepends=True)
    last = {"kind": "event", "name": "record", "step": raw["steps"], "record": records.outcome_of(raw)}
    said = {
        "kind": "event",
        "name": "attention",
        "message": "fa2: 1.5 ms/step; measured before, /home/me/.cache/a.json",
    }
    run.metrics_path.write_text("".join([json.dumps(said) + "\n", *lines, json.dumps(last) + "\n"]))
    run.record_path.write_text(json.dumps({**raw, "metrics_sha256": records.metrics_sha256(run.metrics_path)}))


def test_what_is_published_verifies_and_names_no_machine(ablation, tmp_path):
    for seed in (1, 2):
        tell_of_the_machine(RunDir(ablation / f"tiny-{seed}"))
    (ablation / "tiny-1" / "checkpoints").mkdir()
    folder = records.add(ablation, "tiny-one-out", tmp_path / "records")
    assert folder.name == f"{load_race(ablation).created[:10]}_tiny-one-out"
    text = "".join(path.read_text() for path in folder.rglob("*.json*"))
    assert str(tmp_path.parents[1]) not in text
    assert "GPU-1234" not in text
    assert "/home/me" not in text
    assert {path.name for path in (folder / "tiny-1").iterdir()} == {"run.json", "record.json", "metrics.jsonl"}
    made = {path.name for path in folder.iterdir() if path.is_file()}
    assert made == {"race.json", "report.json", "report.md", "report.html", "ablation.md", "ablation.png"}
    for name in ("tiny", "no-rotary"):
        verdict = verify(sorted(folder.glob(f"{name}-?")), target=9.0, alpha=0.4)
        assert verdict.accepted, verdict.rules
    before, after = RunDir(ablation / "tiny-1"), RunDir(folder / "tiny-1")
    (said, *log, _), (_, *log_before, _) = (run.metrics_path.read_text().splitlines() for run in (after, before))
    assert "fa2: 1.5 ms/step; measured before, a.json" in said
    assert log == log_before
    assert RunRecord.load(after).val_loss == RunRecord.load(before).val_loss


def test_the_pages(ablation, tmp_path):
    published, page = tmp_path / "records", tmp_path / "ablations.md"
    for path, source in ((published / "README.md", records.INDEX), (page, records.ABLATIONS)):
        path.parent.mkdir(exist_ok=True)
        path.write_text((ROOT / source).read_text())
    folder = records.add(ablation, "x", published)
    records.write_pages(published, page)
    report = json.loads((folder / "report.json").read_text())
    mean = report["contestants"][0]["measures"]["val_loss"]["mean"]
    assert (
        f"| [{folder.name}]({folder.name}/report.md) | tiny, ablated | 2/2 | {mean:.4f} |"
        in (published / "README.md").read_text()
    )
    text = page.read_text()
    assert "## Ablation of tiny" in text
    assert f"(../records/{folder.name}/ablation.png)" in text
    assert "| no-rotary |" in text
    assert records.NOTHING not in text
    records.write_pages(tmp_path / "records", page)
    assert page.read_text() == text
    shutil.rmtree(folder)
    records.write_pages(published, page)
    assert records.NOTHING in page.read_text()


def test_refusals(ablation, tmp_path):
    out = tmp_path / "records"
    with pytest.raises(ValueError, match=r"name '\.\./x'"):
        records.add(ablation, "../x", out)
    with pytest.raises(ValueError, match="holds no race"):
        records.add(tmp_path, "x", out)
    with (ablation / "tiny-2" / "metrics.jsonl").open("a") as file:
        file.write("{}\n")
    with pytest.raises(ValueError, match="is not the log that its record was made from"):
        records.add(ablation, "edited", out)
    assert not list(out.iterdir())
    shutil.rmtree(ablation / "tiny-2")
    with pytest.raises(ValueError, match="tiny-2 not begun"):
        records.add(ablation, "half", out)
    (out / f"{load_race(ablation).created[:10]}_there").mkdir()
    with pytest.raises(ValueError, match="is there already"):
        records.add(ablation, "there", out)
