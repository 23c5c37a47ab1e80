import contextlib

import pytest

from nanosprint.data.publish import publish


def make(folder, names):
    with publish(folder) as workshop:
        for name in names:
            (workshop / name).write_text(name)


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def test_replaces_a_dataset_and_leaves_other_files(tmp_path):
    folder = tmp_path / "d"
    make(folder, ["a_train_1.bin", "a_train_2.bin", "a_val_0.bin", "tokenizer.json"])
    (folder / "README.md").write_text("mine")
    make(folder, ["b_train_1.bin", "tokenizer.json"])
    assert names(folder) == ["README.md", "b_train_1.bin", "tokenizer.json"]


def test_a_failure_changes_nothing(tmp_path):
    folder = tmp_path / "d"
    make(folder, ["a_train_1.bin"])
    with contextlib.suppress(RuntimeError), publish(folder) as workshop:
        (workshop / "b_train_1.bin").write_text("")
        raise RuntimeError
    assert names(folder) == ["a_train_1.bin"]
    with pytest.raises(RuntimeError), publish(tmp_path / "new"):
        raise RuntimeError
    assert not (tmp_path / "new").exists()
