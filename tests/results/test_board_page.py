"""The HTML page: self-contained, escaped, small; and in a real browser sorted, pointed at, switched to dark."""

import importlib.util
import json
import math
import os
import random
import re
import shutil
import sys
from html.parser import HTMLParser

import numpy as np
import pytest

from nanosprint.results import DataRecord, RunDir, RunRecord, ShardFile, encode_line, metrics_sha256
from nanosprint.results.importing import import_logs
from nanosprint.results.leaderboard import leaderboard
from nanosprint.results.report import write_report

HOSTILE = 'a<script>alert("x")</script>&amp;</style>'
BASE = {"name": "base", "model": {"dim": 768, "act": "gelu"}, "train": {"num_steps": 400}}
DATA = DataRecord(
    dir="d", files=(ShardFile(name="fineweb_val_000000.bin", tokens=11, sha256="c0ffee00"),), val_tokens=10_485_760
)


def make(path, *, name, hash, seed, loss, seconds, steps=400, log=True, **changes):
    """A run that falls to about `loss` in `seconds`."""
    noise = random.Random(f"{hash}{seed}")
    run, final = RunDir(path), loss + noise.gauss(0, 0.0013)
    path.mkdir(parents=True)
    recipe = {**BASE, "name": name, "model": {"dim": 768, "act": "relu2"}, "train": {"num_steps": steps}}
    run.write_request({"recipe": recipe, "recipe_hash": hash, "seed": seed})
    pace, lines = 1000 * (seconds + noise.gauss(0, seconds / 300)) / steps, []
    for step in range(1, steps + 1):
        falling = final + 7 * math.exp(-step / 25) + 0.6 * (1 - step / steps)
        line = {"step": step, "tokens": step * 524288, "train_ms": step * pace}
        lines.append({"kind": "train", **line, "loss": falling + noise.gauss(0, 0.03)})
        if step % (steps // 8) == 0:
            joules = step * pace * 4.1
            lines.append({"kind": "val", **line, "loss": final if step == steps else falling, "energy_j": joules})
    if log:
        run.metrics_path.write_text("".join(encode_line(line) + "\n" for line in lines))
    record = RunRecord(
        status="finished", recipe=recipe, recipe_hash=hash, execution={"device": "cuda", "compile": "default"},
        seed=seed, world_size=8, devices=({"name": "NVIDIA H200"},) * 8, versions={"torch": "2.11", "triton": "3.6"},
        commit="0123456789abcdef" * 2 + "01234567", dirty=False, data=DATA, epochs=1.0, steps=steps,
        tokens=steps * 524288, train_ms=steps * pace, startup_ms=1.0, val_loss=final, peak_memory_bytes=1,
        tokens_per_s=1.0, mfu=None, energy_j=steps * pace * 4.1, energy_reason=None, wait_fraction=0.0,
        metrics_sha256=metrics_sha256(run.metrics_path) if log else "", series=None,
        created=f"2026-01-0{1 + seed}T10:00:00+00:00", **changes,
    )  # fmt: skip
    record.save(run)
    return run


@pytest.fixture
def runs(tmp_path):
    """Two proven entries, one of a single run, one without a log, and an imported log."""
    root = tmp_path / "runs"
    for seed in range(6):
        make(root / f"quick{seed}", name="quick", hash="1" * 12, seed=seed, loss=3.276, seconds=81.0)
    for seed in range(4):
        make(root / f"slow{seed}", name=HOSTILE, hash="2" * 12, seed=seed, loss=3.272, seconds=120.0)
    make(root / "single", name="base", hash="3" * 12, seed=0, loss=3.31, seconds=60.0)
    make(root / "kept", name="kept", hash="5" * 12, seed=0, loss=3.5, seconds=90.0).request_path.unlink()
    make(root / "bare4", name="bare", hash="4" * 12, seed=0, loss=3.4, seconds=200.0, log=False)
    log = tmp_path / "main.log"
    log.write_text("s:0 tel:11.0\ns:250 tel:6.46\ns:260 trl:6.40 lr:1e-4\n")
    import_logs([log], root / "imported", name="llm.c")
    return root


def page_of(runs, out, **options):
    write_report(leaderboard([runs]), out, base_of=lambda recipe: ("base", BASE), **options)
    return out.read_text()


class Elements(HTMLParser):
    """All elements and their attributes; elements that were never closed, or closed out of turn, are an error."""

    VOID = {"meta", "br", "path", "use"}

    def __init__(self, text):
        super().__init__()
        self.found, self.open, self.texts = [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def test_nothing_is_loaded_and_nothing_hostile_runs(runs, tmp_path):
    text = page_of(runs, tmp_path / "r.html", title=HOSTILE)
    page = Elements(text)
    loads = {"link", "iframe", "object", "embed", "img", "base", "form"}
    assert not [tag for tag, _ in page.found if tag in loads]
    for tag, attributes in page.found:
        assert "src" not in attributes, tag
        assert not [key for key in attributes if key.startswith("on")], tag
        assert (attributes.get("href") or attributes.get("xlink:href") or "#").startswith("#"), (tag, attributes)
    assert sum(tag == "script" for tag, _ in page.found) == 2
    assert not re.search(r"url\((?!#)|@import|https?://(?!www\.w3\.org)", text)
    assert HOSTILE not in text
    assert HOSTILE in page.texts


def test_names_inside_the_page_are_its_only_ones(runs, tmp_path):
    page = Elements(page_of(runs, tmp_path / "r.html"))
    names = [attributes["id"] for _, attributes in page.found if "id" in attributes]
    assert len(names) == len(set(names))
    for _, attributes in page.found:
        for value in attributes.values():
            for name in re.findall(r"url\(#([^)]+)\)", value or ""):
                assert name in names


def test_what_the_page_tells(runs, tmp_path):
    text = page_of(runs, tmp_path / "r.html")
    words = " ".join(Elements(text).texts)
    assert "Ranked by mean training time of the whole run" in words
    assert "Not ranked: mean loss is above the target 3.28." in words
    assert "Runs by training time" in words
    assert "bare4" in words  # the folder of the record without a log
    assert "Not drawn:" in words  # the record without a log
    assert "has no 'train_ms', which x='seconds' needs" in words  # the imported one
    assert re.search(r"<b>model\.act</b> <del>&quot;gelu&quot;</del> <ins>&quot;relu2&quot;</ins>", text)
    assert "NVIDIA H200" in words


def test_time_and_energy_to_the_target(runs, tmp_path):
    """On the straight line between the two validations around it; quick's runs only, the others' tiles differ."""
    page_of(runs, tmp_path / "r.html")
    seconds = []
    for seed in range(6):
        (*_, before, last) = [x for x in RunDir(runs / f"quick{seed}").read_metrics() if x["kind"] == "val"]
        points = [(x["loss"], x["train_ms"] / 1000) for x in (last, before)]
        seconds.append(np.interp(3.28, *zip(*points, strict=True)))
    quick = re.search(r'id="b1e1".*?</dl>', (tmp_path / "r.html").read_text(), re.DOTALL)[0]
    tiles = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", quick))
    assert tiles["time to 3.28"] == f"{np.mean(seconds):.1f} s"
    assert tiles["energy to 3.28"] == f"{np.mean(seconds) * 4.1:.3g} kJ"
    assert tiles["mean power"] == "4,100 W"
    assert "time to 3.28" not in re.search(r'id="b1e3".*?</dl>', (tmp_path / "r.html").read_text(), re.DOTALL)[0]


def test_the_scripts_numbers_are_those_of_the_runs(runs, tmp_path):
    text = page_of(runs, tmp_path / "r.html")
    charts = json.loads(re.search(r'id="charts">(.*?)</script>', text, re.DOTALL)[1])
    board = leaderboard([runs]).boards[0]
    quick = next(e for e in board.entries if e.first.recipe_name == "quick")
    line = next(s for c in charts for s in c["series"] if s["name"] == "validation" and len(s.get("low", [])) == 8)
    assert line["y"][-1] == pytest.approx(quick.loss, abs=1e-5)
    assert line["low"][-1] == pytest.approx(min(quick.losses), abs=1e-5)
    assert line["high"][-1] == pytest.approx(max(quick.losses), abs=1e-5)


def test_ten_entries_stay_below_a_megabyte_and_a_half(tmp_path):
    for i in range(10):
        for seed in range(3):
            name, hash = f"r{i}", f"{i:012d}"
            make(tmp_path / f"{i}-{seed}", name=name, hash=hash, seed=seed, loss=3.27, seconds=50.0 + i, steps=2000)
    page_of(tmp_path, tmp_path / "r.html")
    assert (tmp_path / "r.html").stat().st_size < 1.5e6


def test_bad_input(runs, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"r\.pdf: a report is an \.html file"):
        page_of(runs, tmp_path / "r.pdf")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r"pip install 'nanosprint\[quickstart\]'"):
        page_of(runs, tmp_path / "r.html")
    assert not (tmp_path / "r.html").exists()


def test_command_compares_with_the_parent(nanosprint, tmp_path):
    from nanosprint.config.edit import to_dict
    from nanosprint.recipes import all_recipes, load_recipe

    run = make(tmp_path / "runs" / "a", name="record-third", hash="1" * 12, seed=0, loss=3.2, seconds=9.0)
    record = json.loads(run.record_path.read_text())
    record["recipe"] = to_dict(load_recipe("record-third"))
    run.record_path.write_text(json.dumps(record))
    done = nanosprint("report", "--out", "page.html")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("report: page.html (")
    parent = all_recipes()["record-third"].parent
    assert f"<h3>Against <code>{parent}</code> · 0 changes" not in (tmp_path / "page.html").read_text()
    assert f"<h3>Against <code>{parent}</code>" in (tmp_path / "page.html").read_text()


# --- in a browser -----------------------------------------------------------------------------------------------------

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
needs_browser = pytest.mark.skipif(
    not (CHROMIUM and DRIVER and importlib.util.find_spec("selenium")),
    reason="needs Chromium, chromedriver and selenium: apt install chromium chromium-driver; pip install selenium",
)


@pytest.fixture
def browser(tmp_path, monkeypatch):
    from selenium import webdriver

    for proxy in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(proxy, raising=False)  # the driver is on this machine
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (
        "headless", "no-sandbox", "disable-gpu", "no-first-run", "disable-background-networking",
        "disable-component-update", "disable-sync", "disable-dev-shm-usage", "window-size=1280,1000",
        f"user-data-dir={tmp_path / 'profile'}",
    ):  # fmt: skip
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=DRIVER))
    yield driver
    driver.quit()


@needs_browser
def test_in_chromium(runs, tmp_path, browser):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    page_of(runs, tmp_path / "r.html")
    browser.get((tmp_path / "r.html").as_uri())
    shots = os.environ.get("NANOSPRINT_SCREENSHOTS", tmp_path)

    def shoot(name):
        path = os.path.join(shots, name)
        assert browser.save_screenshot(path)
        assert os.path.getsize(path) > 20_000

    def names():
        return [cell.text.split()[0] for cell in browser.find_elements(By.CSS_SELECTOR, ".board:first-of-type td.name")]

    def sort_button(head):
        return browser.find_element(By.XPATH, f"(//table)[1]//th/button[normalize-space(.)='{head}']")

    hostile = HOSTILE.split()[0]
    assert [n[:20] for n in names()] == ["quick", hostile[:20], "base", "bare", "kept"]
    shoot("desktop-light.png")

    sort_button("loss").click()
    assert [n[:20] for n in names()] == [hostile[:20], "quick", "base", "bare", "kept"]
    sort_button("loss").send_keys(Keys.ENTER)  # by keyboard, the other way round
    assert [n[:20] for n in names()] == ["kept", "bare", "base", "quick", hostile[:20]]
    assert sort_button("loss").find_element(By.XPATH, "..").get_attribute("aria-sort") == "descending"
    sort_button("p").click()  # entries without a p come last
    assert set(names()[2:]) == {"base", "bare", "kept"}

    chart = browser.find_element(By.CSS_SELECTOR, "details[open] .chart.hover")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", chart)
    assert not chart.find_elements(By.CSS_SELECTOR, ".tip")
    ActionChains(browser).move_to_element(chart).perform()
    tip = chart.find_element(By.CSS_SELECTOR, ".tip").text
    assert "optimizer steps" in tip
    assert re.search(r"validation \d\.\d{4} \d\.\d{4} – \d\.\d{4}", tip)
    shoot("hover.png")
    chart.send_keys(Keys.END)
    board = leaderboard([runs]).boards[0]
    assert f"{board.entries[0].loss:.4f}" in chart.find_element(By.CSS_SELECTOR, ".tip").text
    chart.send_keys(Keys.ESCAPE)
    assert not chart.find_elements(By.CSS_SELECTOR, ".tip")

    def background():
        return browser.execute_script("return getComputedStyle(document.body).backgroundColor")

    light = background()
    browser.find_element(By.ID, "theme").click()
    assert background() != light
    browser.execute_script("scrollTo(0, 0)")
    shoot("desktop-dark.png")

    link = browser.find_elements(By.CSS_SELECTOR, "td.name a")[0]
    target = link.get_attribute("href").split("#")[1]
    browser.execute_script("arguments[0].click()", link)
    assert browser.find_element(By.ID, target).get_attribute("open")
    browser.find_element(By.ID, "theme").click()

    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride",
                            {"width": 380, "height": 800, "deviceScaleFactor": 2, "mobile": True})  # fmt: skip
    browser.get((tmp_path / "r.html").as_uri())
    shoot("phone.png")
    wide = browser.execute_script("return document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert wide <= 0, "the page scrolls sideways on a phone"
    browser.execute_script("document.querySelector('details[open]').scrollIntoView()")
    shoot("phone-entry.png")
    errors = [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert errors == []
