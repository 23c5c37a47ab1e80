"""docs/traps.md names tests that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_named_tests_exist():
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", (ROOT / "docs" / "traps.md").read_text())
    assert len(named) > 50
    for path, test in named:
        text = (ROOT / path).read_text()
        assert not test or f"def {test}(" in text, f"docs/traps.md names {path}::{test}"
