"""The report of `weave-moe profile` in a real browser: it renders, and its controls work.

A headless Chromium is driven through its debugging pipe. The network is not merely unused: the page
forbids itself any, and every request that the browser makes is looked at.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from test_profile_gpu import LAYER, FakeGpu
from weave_moe.cli import cli
from weave_moe.profile import load_profile, save_profile
from weave_moe.profile.measures import summarise

CHROMIUM = next(
    (p for n in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(n))), None
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium"),
]
DEADLINE = 60.0


class Browser:
    """One page in a headless Chromium, spoken to in the DevTools protocol."""

    def __init__(self, folder: Path, width: int = 1280, height: int = 900) -> None:
        to_read, self.write = os.pipe()
        self.read, to_write = os.pipe()

        def place() -> None:
            # The browser reads commands from descriptor 3 and answers on 4. Copied by way of high
            # numbers, or one could overwrite the other; dup2 makes them inheritable.
            a, b = os.dup(to_read), os.dup(to_write)
            high = [os.dup2(a, 100), os.dup2(b, 101)]
            os.dup2(high[0], 3)
            os.dup2(high[1], 4)

        assert CHROMIUM is not None
        self.process = subprocess.Popen(
            [
                *(CHROMIUM, "--headless=new", "--remote-debugging-pipe", "--no-sandbox"),
                *(
                    "--disable-gpu",
                    "--disable-dev-shm-usage",
                    "--no-first-run",
                    "--hide-scrollbars",
                ),
                *("--disable-background-networking", "--disable-component-update"),
                *(f"--user-data-dir={folder}", f"--window-size={width},{height}", "about:blank"),
            ],
            preexec_fn=place,
            close_fds=False,
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self.events: list[dict[str, Any]] = []
        self.rest = b""
        self.count = 0
        self.session: str | None = None
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.send("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.send("Emulation.setDeviceMetricsOverride", **metrics)
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        self.count += 1
        message: dict[str, Any] = {"id": self.count, "method": method, "params": params}
        if self.session is not None:
            message["sessionId"] = self.session
        os.write(self.write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.receive()
            if answer.get("id") == self.count:
                assert "error" not in answer, (method, answer)
                result: dict[str, Any] = answer["result"]
                return result

    def receive(self, timeout: float = DEADLINE) -> dict[str, Any]:
        end = time.monotonic() + timeout
        while b"\0" not in self.rest:
            ready, _, _ = select.select([self.read], [], [], max(0.0, end - time.monotonic()))
            assert ready, "the browser does not answer"
            chunk = os.read(self.read, 1 << 20)
            assert chunk, "the browser has gone"
            self.rest += chunk
        line, _, self.rest = self.rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        if "method" in message:
            self.events.append(message)
        return message

    def open(self, page: Path) -> None:
        self.events.clear()
        self.send("Page.navigate", url=page.resolve().as_uri())
        end = time.monotonic() + DEADLINE
        while self.run("document.body && document.body.dataset.ready") != "yes":
            assert time.monotonic() < end, self.complaints()
            time.sleep(0.05)

    def run(self, code: str) -> Any:
        answer = self.send("Runtime.evaluate", expression=code, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def complaints(self) -> list[Any]:
        """Exceptions and messages of the page so far."""
        kinds = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [event["params"] for event in self.events if event["method"] in kinds]

    def requests(self) -> list[str]:
        return [
            event["params"]["request"]["url"]
            for event in self.events
            if event["method"] == "Network.requestWillBeSent"
        ]

    def state(self) -> dict[str, str]:
        found: dict[str, str] = self.run("({...document.body.dataset})")
        return found

    def box(self, selector: str) -> tuple[float, float, float, float]:
        """x, y, width and height in the window, scrolled into view."""
        self.run(f"document.querySelector({selector!r}).scrollIntoView({{block: 'center'}})")
        rect = self.run(
            f"(() => {{const b = document.querySelector({selector!r}).getBoundingClientRect();"
            "return [b.x, b.y, b.width, b.height]})()"
        )
        return rect[0], rect[1], rect[2], rect[3]

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def click(self, selector: str) -> None:
        x, y, width, height = self.box(selector)
        at = (x + width / 2, y + height / 2)
        self.mouse("mousePressed", *at, button="left", clickCount=1)
        self.mouse("mouseReleased", *at, button="left", clickCount=1)

    def choose(self, selector: str, value: str) -> None:
        self.run(
            f"(() => {{const e = document.querySelector({selector!r}); e.value = {value!r};"
            "e.dispatchEvent(new Event('change', {bubbles: true}))})()"
        )

    def key(self, key: str) -> None:
        text = {"text": key} if len(key) == 1 else {}
        self.send("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.send("Input.dispatchKeyEvent", type="keyUp", key=key)

    def pixels(self, selector: str) -> np.ndarray[Any, Any]:
        """What a canvas shows: uint8 [height, width, 3]."""
        image = pytest.importorskip("matplotlib.image")
        url = self.run(f"document.querySelector({selector!r}).toDataURL('image/png')")
        png = base64.b64decode(url.split(",", 1)[1])
        return np.asarray(image.imread(io.BytesIO(png))[..., :3] * 255).round().astype(np.uint8)

    def screenshot(self) -> bytes:
        shot = self.send("Page.captureScreenshot", format="png")
        return base64.b64decode(shot["data"])

    def close(self) -> None:
        os.close(self.write)
        os.close(self.read)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(timeout=DEADLINE)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    found = Browser(tmp_path_factory.mktemp("chromium"))
    try:
        yield found
    finally:
        found.close()


@pytest.fixture(scope="module")
def predicted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A simulated profile of three policies, with thefts under one of them."""
    return made(
        tmp_path_factory.mktemp("predicted"),
        *("--simulate", "--preset", "qwen3-30b", "--tokens", "16", "--routing", "zipf"),
        *("--policy", "window,static_expert,counter"),
    )


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(
        tmp_path_factory.mktemp("recorded"),
        *("--tokens", "200", "--policy", "steal,static_expert", "--backend", "host"),
    )


@pytest.fixture(scope="module")
def on_gpu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the GPU kernel's records look like: of one launch, each block planning for itself."""
    return on_a_gpu(tmp_path_factory.mktemp("gpu"), "40")


@pytest.fixture(scope="module")
def on_gpu_many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of many tokens: between a sort and a combine."""
    return on_a_gpu(tmp_path_factory.mktemp("many"), "300")


def on_a_gpu(folder: Path, tokens: str) -> Path:
    config = folder / "config.json"
    config.write_text(json.dumps(LAYER))
    with pytest.MonkeyPatch.context() as patch:
        FakeGpu().install(patch)
        return made(
            folder,
            *("--config", str(config), "--tokens", tokens, "--routing", "zipf"),
            *("--policy", "window,static_expert"),
        )


def made(folder: Path, *arguments: str) -> Path:
    pytest.importorskip("jinja2")
    result = CliRunner().invoke(cli, ["profile", "--out", str(folder), *arguments])
    assert result.exit_code == 0, result.output
    return folder


def colours_of(pixels: np.ndarray[Any, Any]) -> set[tuple[int, ...]]:
    found, counts = np.unique(pixels.reshape(-1, 3), axis=0, return_counts=True)
    return {tuple(int(v) for v in colour) for colour, n in zip(found, counts, strict=True) if n > 9}


PLANNING = (0xB9, 0xA6, 0xD6)
GATE_UP, DOWN, COMBINE = (0x3F, 0x6F, 0xB5), (0xE3, 0x9A, 0x3B), (0x4F, 0x9D, 0x69)
STOLEN, OWN = (0xC2, 0x18, 0x5B), (0x9D, 0xB3, 0xD1)


@pytest.mark.parametrize("which", ["predicted", "recorded", "on_gpu", "on_gpu_many"])
def test_it_renders_without_a_word_and_without_a_network(
    browser: Browser, which: str, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(which)
    page = folder / "profile.html"
    browser.open(page)
    assert browser.complaints() == []
    own = {page.resolve().as_uri(), "data:,"}
    assert set(browser.requests()) <= own
    profile = load_profile(folder / "profile.npz")
    # A page that forgot its policy would be told by the browser.
    assert browser.run("document.querySelectorAll('#compare thead th').length") == 1 + len(
        profile.runs
    )
    label = browser.run("document.getElementById('producer').textContent")
    assert ("PREDICTED" in label) == (which == "predicted")
    assert browser.run("document.title.startsWith('Predicted')") == (which == "predicted")
    if which in ("predicted", "recorded"):
        assert "load_ns, store_ns" in browser.run("document.getElementById('absent').textContent")
    else:
        assert browser.run("document.getElementById('absent')") is None
    assert {GATE_UP, DOWN} <= colours_of(browser.pixels("#timeline-a"))
    for canvas in ("#timeline-a", "#wave", "#workers", "#experts", "#waves button canvas"):
        assert len(colours_of(browser.pixels(canvas))) > 2, canvas
    # Every task is in view at first, and none of another policy.
    state = browser.state()
    assert state["policy"] == profile.runs[0].policy
    assert int(state["seen"]) == len(profile.runs[0].records)
    # Nothing is cut off to the right.
    assert browser.run("document.documentElement.scrollWidth <= innerWidth")


def test_a_request_would_be_refused_by_the_page(browser: Browser, recorded: Path) -> None:
    """A planted fault: what the first test looks for can happen, and the page itself stops it."""
    page = recorded / "planted.html"
    text = (recorded / "profile.html").read_text(encoding="utf-8")
    page.write_text(text.replace("</header>", '<img src="http://127.0.0.1:9/x.png"></header>'))
    browser.open(page)
    assert any("Content Security Policy" in json.dumps(entry) for entry in browser.complaints())


def test_texts_of_a_file_stay_texts(browser: Browser, recorded: Path, tmp_path: Path) -> None:
    hostile = "</script x><script>document.body.dataset.owned = 1</script><img src=x onerror=y>"
    profile = load_profile(recorded / "profile.npz")
    runs = (replace(profile.runs[0], policy=hostile), *profile.runs[1:])
    changed = replace(profile, title=hostile, routing=hostile, notes=(hostile,), runs=runs)
    (tmp_path / "a.npz").write_bytes(save_profile(changed))
    browser.open(made(tmp_path, "--from", str(tmp_path / "a.npz")) / "profile.html")
    assert browser.complaints() == []
    assert browser.state()["policy"] == hostile
    assert "owned" not in browser.state()
    assert browser.run("document.querySelector('h1').textContent") == hostile
    assert browser.run("document.querySelector('img')") is None


def test_a_policy_is_chosen_in_three_ways(browser: Browser, predicted: Path) -> None:
    browser.open(predicted / "profile.html")
    before = browser.pixels("#timeline-a")
    browser.choose("#policy", "1")
    assert browser.state()["policy"] == "static_expert"
    after = browser.pixels("#timeline-a")
    assert before.shape != after.shape or (before != after).any()
    assert "No thefts under static_expert" in browser.run(
        "document.getElementById('steals-caption').textContent"
    )
    browser.click("#waves button:nth-child(3)")
    assert browser.state()["policy"] == "counter"
    assert browser.run("document.getElementById('policy').value") == "2"
    pressed = browser.run(
        "[...document.querySelectorAll('#waves button')].map(b => b.getAttribute('aria-pressed'))"
    )
    assert pressed == ["false", "false", "true"]
    browser.run("document.getElementById('policy').focus()")
    browser.key("ArrowUp")
    browser.key("Enter")
    assert browser.state()["policy"] in ("static_expert", "counter")


def test_a_second_policy_beside_the_first(browser: Browser, predicted: Path) -> None:
    browser.open(predicted / "profile.html")
    assert browser.run("document.getElementById('second').hidden")
    browser.choose("#beside", "1")
    assert not browser.run("document.getElementById('second').hidden")
    assert browser.state()["beside"] == "static_expert"
    assert {GATE_UP, DOWN} <= colours_of(browser.pixels("#timeline-b"))
    profile = load_profile(predicted / "profile.npz")
    # Both share one zoom.
    assert int(browser.state()["seen"]) == sum(len(run.records) for run in profile.runs[:2])
    browser.choose("#beside", "-1")
    assert browser.run("document.getElementById('second').hidden")


def test_colours(browser: Browser, predicted: Path) -> None:
    browser.open(predicted / "profile.html")
    stage = colours_of(browser.pixels("#timeline-a"))
    assert {GATE_UP, DOWN, STOLEN} <= stage
    assert OWN not in stage
    browser.click("input[value=stolen]")
    stolen = colours_of(browser.pixels("#timeline-a"))
    assert {OWN, STOLEN} <= stolen
    assert not {GATE_UP, DOWN} & stolen
    browser.click("input[value=expert]")
    expert = colours_of(browser.pixels("#timeline-a"))
    assert len(expert) > 10
    assert not {GATE_UP, DOWN, OWN} & expert
    assert "an expert" in browser.run("document.getElementById('legend').textContent")
    # Under a policy that steals nothing there is nothing in that colour.
    browser.click("input[value=stolen]")
    browser.choose("#policy", "2")
    assert STOLEN not in colours_of(browser.pixels("#timeline-a"))


def test_zoom(browser: Browser, predicted: Path) -> None:
    browser.open(predicted / "profile.html")
    run = load_profile(predicted / "profile.npz").runs[0]

    def window() -> tuple[float, float]:
        state = browser.state()
        return float(state["from"]), float(state["to"])

    def in_view() -> int:
        low, high = window()
        records = run.records
        return int(((records["end_ns"] >= low) & (records["compute_ns"] <= high)).sum())

    whole = window()
    assert whole[0] == 0
    browser.click("#in")
    low, high = window()
    assert high - low == pytest.approx(whole[1] / 2)
    assert int(browser.state()["seen"]) == in_view() < len(run.records)
    browser.click("#later")
    assert window()[0] > low
    browser.click("#earlier")
    assert window() == pytest.approx((low, high))
    browser.click("#out")
    assert window() == pytest.approx(whole)
    # By dragging, from a quarter to a half of the time.
    x, y, width, height = browser.box("#timeline-a")
    left, right = x + 46 + (width - 46) * 0.25, x + 46 + (width - 46) * 0.5
    browser.mouse("mousePressed", left, y + height / 2, button="left", clickCount=1)
    browser.mouse("mouseMoved", right, y + height / 2, button="left", buttons=1)
    browser.mouse("mouseReleased", right, y + height / 2, button="left", clickCount=1)
    assert window() == pytest.approx((whole[1] * 0.25, whole[1] * 0.5), abs=whole[1] * 0.01)
    assert int(browser.state()["seen"]) == in_view()
    # By the wheel, towards the pointer.
    before = window()
    browser.mouse("mouseWheel", left, y + height / 2, deltaX=0, deltaY=-100)
    assert window()[1] - window()[0] == pytest.approx((before[1] - before[0]) * 0.8)
    # By keys, and back.
    browser.run("document.getElementById('timeline-a').focus()")
    inner = window()
    browser.key("+")
    assert window()[1] - window()[0] == pytest.approx((inner[1] - inner[0]) / 2)
    browser.key("0")
    assert window() == whole
    # Never beyond the launch, nor to nothing.
    for _ in range(40):
        browser.key("+")
    assert window()[1] - window()[0] == pytest.approx(20)
    browser.key("ArrowLeft")
    browser.click("#all")
    assert window() == whole


def test_pointing_at_a_task_tells_about_it(browser: Browser, predicted: Path) -> None:
    browser.open(predicted / "profile.html")
    run = load_profile(predicted / "profile.npz").runs[0]
    stolen = run.records[run.records["victim"] >= 0]
    assert len(stolen)
    task = stolen[np.argmax(stolen["end_ns"] - stolen["compute_ns"])]
    x, y, width, _ = browser.box("#timeline-a")
    end = float(browser.state()["to"])
    row = max(2, min(22, 460 // run.workers))
    middle = (int(task["compute_ns"]) + int(task["end_ns"])) / 2
    at = (x + 46 + (width - 46) * middle / end, y + (int(task["worker"]) + 0.5) * row)
    browser.mouse("mouseMoved", *at)
    text = browser.run("document.getElementById('tip').textContent")
    assert f"stolen from worker {task['victim']}" in text
    assert f"worker {task['worker']} on SM {task['sm']}" in text
    assert f"group {task['group']}, chunk {task['chunk']}" in text
    browser.mouse("mouseMoved", 5, 5)
    assert browser.run("document.getElementById('tip').hidden")


def test_planning_is_drawn_where_each_block_plans(
    browser: Browser, on_gpu: Path, on_gpu_many: Path
) -> None:
    browser.open(on_gpu / "profile.html")
    pixels = browser.pixels("#timeline-a")
    assert PLANNING in colours_of(pixels)
    run = load_profile(on_gpu / "profile.npz").runs[0]
    assert run.planned_ns is not None
    # From the left edge until the plan is there, and not beyond.
    columns = np.flatnonzero((pixels == PLANNING).all(axis=2).any(axis=0))
    scale = (pixels.shape[1] - 46) / float(browser.state()["to"])
    assert columns.min() == pytest.approx(46 + run.first_ns.min() * scale, abs=2)
    assert columns.max() == pytest.approx(46 + run.planned_ns.max() * scale, abs=2)
    assert "planning" in browser.run("document.getElementById('legend').textContent")
    waits = "waiting for other tasks or first weights"
    assert waits in browser.run("document.getElementById('legend').textContent")
    assert "sort" not in browser.run("document.getElementById('caption-a').textContent")
    browser.open(on_gpu_many / "profile.html")
    assert PLANNING not in colours_of(browser.pixels("#timeline-a"))
    assert "planning" not in browser.run("document.getElementById('legend').textContent")
    caption = browser.run("document.getElementById('caption-a').textContent")
    assert "before it, combine" in caption


def test_pointing_at_a_task_of_a_gpu_tells_its_loads_and_stores(
    browser: Browser, on_gpu: Path
) -> None:
    browser.open(on_gpu / "profile.html")
    run = load_profile(on_gpu / "profile.npz").runs[0]
    tiles = run.records[run.records["stage"] < 2]
    task = tiles[np.argmax(tiles["end_ns"] - tiles["compute_ns"])]
    x, y, width, _ = browser.box("#timeline-a")
    row = max(2, min(22, 460 // run.workers))
    middle = int(task["compute_ns"]) + 0.3 * int(task["end_ns"] - task["compute_ns"])
    at = x + 46 + (width - 46) * middle / float(browser.state()["to"])
    browser.mouse("mouseMoved", at, y + (int(task["worker"]) + 0.5) * row)
    text = browser.run("document.getElementById('tip').textContent")
    assert f"on SM {task['sm']}" in text
    assert "weights asked for at" in text
    assert "of it storing" in text
    browser.mouse("mouseMoved", 5, 5)


def test_experts_can_be_sorted(browser: Browser, predicted: Path) -> None:
    browser.open(predicted / "profile.html")
    counts = load_profile(predicted / "profile.npz").expert_tokens
    assert browser.state()["first"] == "0"
    browser.click("#sorted")
    assert browser.state()["first"] == str(int(counts.argmax()))


def test_what_is_drawn_as_busy_is_what_was_counted(browser: Browser, recorded: Path) -> None:
    """The script's own arithmetic, from the page's data, against Python's."""
    browser.open(recorded / "profile.html")
    profile = load_profile(recorded / "profile.npz")
    data = browser.run("JSON.parse(document.getElementById('data').textContent)")
    for run, shown in zip(profile.runs, data["runs"], strict=True):
        summary = summarise(profile, run)
        assert shown["busy"] == pytest.approx(summary.worker_busy, abs=1e-4)
        assert sum(pair[2] for pair in shown["pairs"]) == summary.steals
    # The wave's coloured area is the busy share of the whole.
    image = browser.pixels("#wave")
    summary = summarise(profile, profile.runs[0])
    scale = browser.run("devicePixelRatio")
    bottom, left = image.shape[0] - round(18 * scale), round(46 * scale)
    plot = image[:bottom, left:]
    filled = np.zeros(plot.shape[:2], bool)
    for colour in (GATE_UP, DOWN, COMBINE):
        filled |= (np.abs(plot.astype(int) - colour).sum(axis=2)) < 30
    longest = max(run.makespan_ns for run in profile.runs)
    expected = summary.busy_share * summary.makespan_ns / longest
    area = filled.sum() / (plot.shape[1] * (bottom - 6 * scale))
    assert area == pytest.approx(expected, abs=0.05)


def main() -> None:
    """A page as docs/ shows it: test_profile_browser.py PAGE.html OUT.png HEIGHT [SCRIPT...]."""
    page, out, height, *scripts = sys.argv[1:]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        browser = Browser(Path(folder), height=int(height))
        try:
            light = {"name": "prefers-color-scheme", "value": "light"}
            browser.send("Emulation.setEmulatedMedia", features=[light])
            browser.open(Path(page))
            for code in scripts:
                browser.run(code)
            time.sleep(0.2)  # what was asked for is drawn with the next frame
            Path(out).write_bytes(browser.screenshot())
        finally:
            browser.close()


if __name__ == "__main__":
    main()
