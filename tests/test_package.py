"""The package as others get it: imports, public face, a built wheel."""

import ast
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import nanosprint

ROOT = Path(nanosprint.__file__).parent
TRAINING_PATH = {"torch", "numpy"}
# Which of our packages each may import, besides itself, config, errors, files and extras; see docs/architecture.md.
MAY_IMPORT = {
    "config": set(),
    "kernels": set(),
    "ops": {"kernels"},
    "recipes": set(),
    "data": set(),
    "results": set(),
    "model": {"ops"},
    "optim": {"ops", "kernels"},
    "training": {"ops", "model", "optim", "data", "results"},
    "evidence": {"recipes", "data", "results", "training"},
}
FREE = {"config", "errors", "files", "extras", "nanosprint"}


def imports(path: Path, top_level_only: bool = True) -> set[str]:
    """Modules imported when `path` is imported; under TYPE_CHECKING and in functions they are not."""
    found: set[str] = set()
    body = ast.parse(path.read_text()).body
    nodes = body if top_level_only else [n for top in body for n in ast.walk(top)]
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_who_imports_whom(package):
    allowed = MAY_IMPORT[package] | FREE | {package}
    for path in sorted((ROOT / package).rglob("*.py")):
        ours = {m.split(".")[1] for m in imports(path) if m.startswith("nanosprint.")}
        assert ours <= allowed, f"{path} imports {ours - allowed}"


def test_configuration_and_results_need_no_torch():
    for package in ("config", "recipes", "results", "evidence"):
        for path in (ROOT / package).rglob("*.py"):
            third_party = {m.split(".")[0] for m in imports(path)} - set(sys.stdlib_module_names) - {"nanosprint"}
            assert not third_party, f"{path} imports {third_party}"


def test_training_needs_torch_and_numpy_only():
    for package in ("config", "ops", "model", "optim", "training", "data", "results"):
        for path in (ROOT / package).rglob("*.py"):
            third_party = {m.split(".")[0] for m in imports(path)} - set(sys.stdlib_module_names) - {"nanosprint"}
            assert third_party <= TRAINING_PATH, f"{path} imports {third_party}"


def test_importing_touches_no_torch():
    code = "import nanosprint, sys; assert 'torch' not in sys.modules; print(nanosprint.__all__)"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_evidence_starts_processes_without_torch():
    code = "import sys; sys.modules['torch'] = None; import nanosprint.evidence.race, nanosprint.evidence.outcome"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_public_face():
    for name in nanosprint.__all__:
        assert getattr(nanosprint, name) is not None
    assert callable(nanosprint.train)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        nanosprint.trian  # noqa: B018
    from nanosprint.optim import Muon

    assert nanosprint.optim.Muon is Muon
    for name in nanosprint.optim.__all__:
        assert getattr(nanosprint.optim, name) is not None


def test_a_built_wheel_runs(tmp_path):
    """Built without network, unpacked elsewhere, run from there: the package data came along."""
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT.parent)]
    result = subprocess.run(build, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    assert not [p for p in site.iterdir() if p.name not in ("nanosprint",) and not p.name.endswith(".dist-info")]
    code = (
        "import nanosprint, nanosprint.data.tokenizers as t; "
        f"assert nanosprint.__file__.startswith({str(site)!r}); "
        "print(t.load_tokenizer(None, 'gpt2').encode('hello world').tolist())"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": str(site)}, capture_output=True, text=True
    )
    assert run.stdout.strip() == "[31373, 995]", run.stderr
    command = [sys.executable, "-m", "nanosprint", "train", "tiny", "--device", "cpu", "--max-steps", "1"]
    run = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(site)}, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_kernel_arguments_have_names_that_triton_leaves_free():
    """Triton 3.6 builds a launcher with locals of its own: an argument called `params` never arrives."""
    taken = {"params", "specialization", "options"}
    for path in sorted((ROOT / "kernels").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list):
                clash = taken & {a.arg for a in node.args.args}
                assert not clash, f"{path.name}: {node.name} has arguments called {clash}"
