"""What the README and docs/ promise: commands parse, examples run, files exist, links resolve."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest

from nanosprint import cli
from nanosprint.recipes import load_recipe

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
PAGES = [README, ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
IN_LINE = re.compile(r"`(nanosprint [^`]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
PLACEHOLDER = re.compile(r"\.\.\.|\b[A-Z]{2,}\b|\bshow NAME|\bdiff A B")  # RECIPE, KEY=VALUE ... : forms, not commands
NAMES_PLACE = re.compile(r"\b(DIR|FILE\.txt|HOST)\b")  # stand for one word that a reader puts in

needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def blocks(page: Path, language: str) -> list[str]:
    return [code for kind, code in FENCE.findall(page.read_text("utf-8")) if kind == language]


def shell_lines(page: Path) -> list[str]:
    """The lines of the shell blocks; one that a backslash continues counts as one."""
    return [line for block in blocks(page, "bash") for line in block.replace("\\\n", "").splitlines()]


def outside_blocks(page: Path) -> str:
    return FENCE.sub("", page.read_text("utf-8"))


def nanosprint_commands() -> list[list[str]]:
    """The words behind `nanosprint` of every command shown, in blocks (torchrun's too) and within lines."""
    found = []
    for page in PAGES:
        lines = shell_lines(page)
        lines += [line for line in IN_LINE.findall(outside_blocks(page)) if not PLACEHOLDER.search(_filled(line))]
        for line in lines:
            words = [word.removeprefix(".venv/bin/") for word in shlex.split(_filled(line), comments=True)]
            if "nanosprint" in words:
                found.append(words[words.index("nanosprint") + 1 :])
    return found


def _filled(line: str) -> str:
    return NAMES_PLACE.sub("place", line)


def parse(words: list[str]) -> tuple[click.Command, dict[str, Any]]:
    """The command that the words name, and its parameters, by the parser of the command line itself."""
    command: click.Command = cli.cli
    words = list(words)
    while isinstance(command, click.Group):
        name = words.pop(0)
        while name.startswith("-"):
            name = words.pop(0)
        command = command.commands[name]
    return command, command.make_context(command.name, words).params


def test_there_is_something_to_check():
    assert len(nanosprint_commands()) > 25
    names = {words[0] for words in nanosprint_commands()}
    assert names >= {"train", "resume", "sample", "plot", "recipes", "check", "data"}


@pytest.mark.parametrize("words", nanosprint_commands(), ids=" ".join)
def test_a_command_shown_is_one(words):
    """Options and arguments parse; recipes exist and take their overrides; budgets can be read."""
    from nanosprint.config.recipe import Execution
    from nanosprint.training.request import parse_budget

    if words[-1] in cli.cli.commands and len(words) == 1:
        return  # the bare name of a command or group
    command, given = parse(words)
    if command.name in ("train", "check", "show") and (given.get("recipe") or given.get("name")):
        overrides, execution = cli._split_overrides(given["overrides"])
        load_recipe(given.get("recipe") or given["name"], overrides)
        cli._execution(Execution(), execution, given.get("device"), given.get("gpus"))
    if command.name == "diff":
        load_recipe(given["old"])
        load_recipe(given["new"])
    if given.get("budget"):
        parse_budget(given["budget"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_shell_blocks_are_shell(page):
    for block in blocks(page, "bash"):
        checked = subprocess.run(["bash", "-n"], input=block, text=True, capture_output=True)
        assert checked.returncode == 0, f"{page.name}: {checked.stderr}\n{block}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_files_and_modules_named_in_shell_blocks_exist(page):
    for line in shell_lines(page):
        words = shlex.split(line, comments=True)
        for i, word in enumerate(words):
            if word.endswith((".py", ".sh")):
                assert (ROOT / word).is_file(), line
            if word == "-m" and words[i + 1].startswith("benchmarks."):
                module = ROOT / words[i + 1].replace(".", "/")
                assert module.with_suffix(".py").is_file() or (module / "__main__.py").is_file(), line


def test_python_examples_run(tmp_path):
    examples = blocks(README, "python")
    assert len(examples) == 2
    for code in examples:
        result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert result.returncode == 0, result.stderr
    assert (tmp_path / "runs/api/record.json").exists()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_resolve(page):
    for target in LINK.findall(outside_blocks(page)):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{page.name}: {target}"
        if anchor:
            heads = re.findall(r"^#+ (.+)$", linked.read_text("utf-8"), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
            assert anchor in anchors, f"{page.name}: {target}"


def tree() -> list[Path]:
    """Every file and folder that the README's tree names."""
    (text,) = [block for block in blocks(README, "text") if block.startswith("nanosprint/\n")]
    named: list[Path] = []
    folders: list[str] = []
    for line in text.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        folders = folders[:depth]
        for word in line.split():
            if not word.endswith((".py", "/")):
                break
            named.append(ROOT.joinpath(*folders, word))
            if word.endswith("/"):
                folders.append(word)
    return named


def test_the_tree_is_the_tree():
    named = tree()
    assert len(named) > 60
    missing = [str(path.relative_to(ROOT)) for path in named if not path.exists()]
    assert not missing, f"the README's tree names {missing}"
    package = ROOT / "nanosprint"
    folders = {path.parent for path in package.rglob("*.py")} - {package}
    assert folders <= set(named), f"the README's tree lacks {sorted(map(str, folders - set(named)))}"


def test_every_recipe_and_command_is_told_of():
    changelog = (ROOT / "CHANGELOG.md").read_text("utf-8")
    from nanosprint.recipes import all_recipes

    assert not [name for name in all_recipes() if f"`{name}`" not in changelog]
    readme = README.read_text("utf-8")
    assert not [name for name in cli.cli.commands if f"`nanosprint {name}" not in readme]


@needs_make
@pytest.mark.parametrize(("target", "last"), [("quickstart", "scripts/quickstart.sh"), ("test", "-m pytest")])
def test_the_two_commands_of_make(target, last):
    command = ["make", "--no-print-directory", "-n", target]  # within `make test`, make would announce itself
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert last in shown.stdout.splitlines()[-1]
