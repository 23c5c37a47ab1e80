import multiprocessing

import pytest

from nanosprint.data import datasets
from nanosprint.data.datasets import ensure_dataset


def test_builds_an_embedded_set_once(tmp_path, monkeypatch):
    folder = ensure_dataset("tiny", root=tmp_path)
    assert folder == tmp_path / "tiny"
    assert {p.name for p in folder.glob("*.bin")} == {"tiny_train_000001.bin", "tiny_val_000000.bin"}
    monkeypatch.setitem(datasets.BUILT_IN, "tiny", lambda folder: pytest.fail("built again"))
    assert ensure_dataset("tiny", root=tmp_path) == folder


def test_builds_under_the_current_directory_by_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert ensure_dataset("tiny").resolve() == tmp_path / "data/tiny"


def test_an_interrupted_build_is_done_again(tmp_path, monkeypatch):
    def broken(folder):
        folder.mkdir(exist_ok=True)
        (folder / "tiny_train_000001.bin").write_bytes(b"half")
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setitem(datasets.BUILT_IN, "tiny", broken)
        with pytest.raises(OSError, match="disk full"):
            ensure_dataset("tiny", root=tmp_path)
    ensure_dataset("tiny", root=tmp_path)
    assert (tmp_path / "tiny/tiny_train_000001.bin").stat().st_size > 100_000


@pytest.mark.parametrize("as_text", [True, False])
def test_any_folder_with_shards(write, tmp_path, as_text):
    write("d/x_train_1.bin", [1])
    write("d/x_val_0.bin.xz", [1])  # only its name is looked at here
    folder = tmp_path / "d"
    assert ensure_dataset("whatever", str(folder) if as_text else folder) == folder


@pytest.mark.parametrize(
    ("name", "remedy"),
    [("fineweb10B", "nanosprint data download fineweb10B"), ("mine", "nanosprint data prepare FILE --out data/mine")],
)
def test_sets_that_are_not_here(tmp_path, name, remedy):
    with pytest.raises(ValueError, match=remedy) as error:
        ensure_dataset(name, root=tmp_path)
    assert str(tmp_path / name) in str(error.value)
    (tmp_path / name).mkdir()
    with pytest.raises(ValueError, match=remedy):
        ensure_dataset(name, root=tmp_path)


def test_a_folder_without_one_of_the_splits(write, tmp_path):
    write("d/x_train_1.bin", [1])
    with pytest.raises(ValueError, match=r"has no \*val\*\.bin"):
        ensure_dataset("x", tmp_path / "d")
    with pytest.raises(ValueError, match="does not exist"):
        ensure_dataset("x", tmp_path / "none")


def test_several_processes_build_at_once(tmp_path):
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=ensure_dataset, args=("tiny", None, tmp_path)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    names = sorted(p.name for p in (tmp_path / "tiny").iterdir())
    assert names == [".lock", "tiny_train_000001.bin", "tiny_val_000000.bin", "tokenizer.json"]
