"""Against a hub of our own on this machine that drops connections; HF_ENDPOINT leads huggingface_hub there."""

import hashlib
import http.server
import json
import os
import re
import struct
import subprocess
import sys
import threading

import pytest

from nanosprint.data.download import PUBLISHED, download

REPO = "kjj0/fineweb10B-gpt2"
COUNT = 40_000


def shard_bytes(seed, count=COUNT):
    return struct.pack("<256i", 20240520, 1, count, *[0] * 253) + bytes((seed + i) % 251 for i in range(2 * count))


class Hub(http.server.ThreadingHTTPServer):
    """Serves files; `drops` of its answers stop after `drop_after` bytes. Keeps what was asked for."""

    daemon_threads = True

    def __init__(self, files, drops=0, drop_after=30_000):
        super().__init__(("127.0.0.1", 0), Answer)
        self.files, self.drops, self.drop_after = files, drops, drop_after
        self.requests = []

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"


class Answer(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self.answer(with_body=False)

    def do_GET(self):
        self.answer(with_body=True)

    def answer(self, with_body):
        hub = self.server
        name = self.path.removeprefix(f"/datasets/{REPO}/resolve/main/")
        start = int(re.match(r"bytes=(\d+)-", self.headers.get("Range", "bytes=0-"))[1])
        hub.requests.append((self.command, name, start))
        content = hub.files.get(name)
        if content is None:
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(206 if start else 200)
        self.send_header("X-Repo-Commit", "c" * 40)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(content) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if not with_body:
            return
        if hub.drops > 0:
            hub.drops -= 1
            self.wfile.write(content[start : start + hub.drop_after])
            self.wfile.flush()
            self.close_connection = True
            self.connection.shutdown(2)
            return
        self.wfile.write(content[start:])


@pytest.fixture
def serve():
    pytest.importorskip("huggingface_hub")
    hubs = []

    def start(files, **settings):
        hub = Hub(files, **settings)
        threading.Thread(target=hub.serve_forever, args=(0.02,), daemon=True).start()
        hubs.append(hub)
        return hub

    yield start
    for hub in hubs:
        hub.shutdown()
        hub.server_close()


PROGRAM = """
import json, sys
from pathlib import Path
import huggingface_hub.constants
from nanosprint.data.download import download
huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE = 10_000  # it keeps whole chunks of what arrived; 10 MB by default
try:
    paths = download("fineweb10B", Path(sys.argv[1]), int(sys.argv[2]), pause_s=0.01, notify=print)
    print(json.dumps([str(p) for p in paths]))
except ValueError as error:
    print("REFUSED", error)
"""


def run(url, folder, shards):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and k.lower() != "http_proxy"}
    environment |= {
        "HF_ENDPOINT": url,
        "HF_HOME": str(folder / "hf-home"),
        "NO_PROXY": "127.0.0.1",
        "HF_HUB_ETAG_TIMEOUT": "2",
        "TQDM_POSITION": "-1",  # shows the bar although this is no terminal
    }
    command = [sys.executable, "-c", PROGRAM, str(folder), str(shards)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)


VAL, TRAIN = "fineweb_val_000000.bin", "fineweb_train_000001.bin"


def test_fetches_through_dropped_connections_and_skips_what_is_there(serve, tmp_path):
    files = {VAL: shard_bytes(1), TRAIN: shard_bytes(2), "fineweb_train_000002.bin": shard_bytes(3)}
    hub = serve(files, drops=2)
    done = run(hub.url, tmp_path, 2)
    for name, content in files.items():
        assert (tmp_path / name).read_bytes() == content
    assert json.loads(done.stdout.splitlines()[-1]) == [str(tmp_path / name) for name in files]
    assert "%|" in done.stderr  # the progress bar
    starts = [start for method, name, start in hub.requests if method == "GET" and name == VAL]
    assert starts == [0, 30_000, 60_000]
    assert json.loads((tmp_path / "tokenizer.json").read_text()) == {"kind": "gpt2", "vocab_size": 50257}
    hub.requests.clear()
    (tmp_path / TRAIN).write_bytes(files[TRAIN][:-7])  # truncated by something else
    again = run(hub.url, tmp_path, 2)
    assert {name for _, name, _ in hub.requests if name.endswith(".bin")} == {TRAIN}
    assert again.stdout.count("is here already") == 2
    assert (tmp_path / TRAIN).read_bytes() == files[TRAIN]


def test_goes_on_with_the_part_that_a_killed_run_left(serve, tmp_path):
    files = {VAL: shard_bytes(1), TRAIN: shard_bytes(2)}
    hub = serve(files)
    etag = hashlib.sha256(files[VAL]).hexdigest()
    (tmp_path / f".{VAL}.{etag[:40]}.part").write_bytes(files[VAL][:50_001])
    run(hub.url, tmp_path, 1)
    assert ("GET", VAL, 50_001) in hub.requests
    assert (tmp_path / VAL).read_bytes() == files[VAL]
    assert not list(tmp_path.glob(".*.part"))


def test_a_bad_file_on_the_hub(serve, tmp_path):
    hub = serve({VAL: shard_bytes(1)[:-2], TRAIN: shard_bytes(2)})
    done = run(hub.url, tmp_path, 1)
    assert re.search(rf"REFUSED could not fetch {VAL} in 4 attempts: .*truncated", done.stdout)
    assert not (tmp_path / VAL).exists()


def test_a_file_that_the_hub_does_not_have(serve, tmp_path):
    done = run(serve({VAL: shard_bytes(1)}).url, tmp_path, 1)
    assert f"REFUSED the hub has no {TRAIN} in {REPO}" in done.stdout
    assert (tmp_path / VAL).exists()


def test_offline(tmp_path):
    pytest.importorskip("huggingface_hub")
    done = run("http://127.0.0.1:9", tmp_path, 1)
    assert "REFUSED could not fetch fineweb_val_000000.bin in 4 attempts" in done.stdout
    assert "give the same command again" in done.stdout
    assert "HF_ENDPOINT" in done.stdout
    assert f"https://huggingface.co/datasets/{REPO}" in done.stdout


def test_names_and_numbers(tmp_path):
    assert PUBLISHED["fineweb10B"].file_names(2)[1:] == ["fineweb_train_000001.bin", "fineweb_train_000002.bin"]
    assert PUBLISHED["fineweb10B"].file_names(None)[-1] == "fineweb_train_000103.bin"
    assert PUBLISHED["fineweb100B"].file_names(None)[-1] == "fineweb_train_001030.bin"
    assert PUBLISHED["finewebedu10B"].file_names(None)[::99] == [
        "finewebedu_val_000000.bin",
        "finewebedu_train_000099.bin",
    ]
    with pytest.raises(ValueError, match="unknown data set 'fineweb'; to download"):
        download("fineweb", tmp_path)
    for shards in (0, 104):
        with pytest.raises(ValueError, match=f"--shards {shards} must lie between 1 and 103"):
            download("fineweb10B", tmp_path, shards)


def test_does_not_mix_with_other_data(tmp_path):
    pytest.importorskip("huggingface_hub")
    (tmp_path / "tokenizer.json").write_text('{"kind": "bytes", "vocab_size": 257}')
    with pytest.raises(ValueError, match="made with the tokenizer 'bytes'"):
        download("fineweb10B", tmp_path, 1)


def test_without_huggingface_hub(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ValueError, match=r"nanosprint\[data\]"):
        download("fineweb10B", tmp_path, 1)
