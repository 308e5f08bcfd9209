"""The pages in a real browser: nothing is loaded, nothing is wider than a phone, every figure is that of the files."""

from __future__ import annotations

import base64
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardwise.planner import Cluster, Workload, estimate
from shardwise.report import compare_page, plan_report, read_run, run_page
from shardwise.spec.plan import ParallelPlan
from shardwise.spec.schedule import PipelinePolicy
from shardwise.spec.shape import known_shape
from shardwise.spec.text import size
from tests.common.browser import WHY_NOT, Browser, find
from tests.report.folders import BYTES, records, write_run

pytestmark = pytest.mark.skipif(find() is None, reason=WHY_NOT)
KINDS = ("pipeline", "compared", "plan", "streams")


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("pages")
    runs = [
        write_run(base / "run"),
        write_run(base / "pipeline", pp=2, strategy="zero1", seed=1),
        write_run(base / "killed-in-a-folder-with-a-rather-long-name", steps=9, exit_code=None, seed=2),
    ]
    cluster = Cluster(gpu="H100-80GB-SXM", num_gpus=64)
    workload = Workload(seq_len=8192, global_batch=128)
    plans = [
        ParallelPlan(strategy="zero1", tp=4, pp=4, pipeline=PipelinePolicy("interleaved-1f1b")),
        ParallelPlan(strategy="ddp"),
        ParallelPlan(strategy="zero3"),
    ]
    estimates = [estimate(known_shape("llama-3-8b"), plan, cluster, workload) for plan in plans]
    texts = {
        "run": run_page(read_run(runs[0])),
        "pipeline": run_page(read_run(runs[1])),
        "compared": compare_page([read_run(run) for run in runs]),
        "plan": plan_report(estimates),
        "streams": plan_report(estimates[::-1]),
    }
    found = {}
    for name, text in texts.items():
        found[name] = base / f"{name}.html"
        found[name].write_text(text)
    return found


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    opened = Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (360, "dark")])
def test_a_page_is_quiet_asks_for_nothing_and_fits(
    browser: Browser, pages: dict[str, Path], kind: str, width: int, scheme: str
) -> None:
    url = pages[kind].as_uri()
    browser.open(url, width=width, scheme=scheme)
    assert browser.requested() == [url]
    browser.run("document.querySelectorAll('details').forEach(each => each.open = true)")
    assert browser.run("document.documentElement.scrollWidth") <= width
    assert browser.run(OUTSIDE) == []
    assert browser.said() == []
    assert browser.run(UNDRAWN) == []


#: Elements that reach beyond the window, but for those inside of what scrolls, or of a picture.
OUTSIDE = """[...document.querySelectorAll('main *, header *, footer *')]
    .filter(e => !e.closest('.scroll, pre') && !e.ownerSVGElement && e.getBoundingClientRect().right > innerWidth + 0.5)
    .map(e => e.outerHTML.slice(0, 80))"""
#: Charts without a picture, or with a picture without a mark, or with a mark that has no place.
UNDRAWN = """[...document.querySelectorAll('.chart')]
    .filter(c => !c.querySelector('svg .role-mark path, svg .role-mark rect') || c.innerHTML.includes('NaN'))
    .map(c => c.ariaLabel)"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("kind", KINDS)
def test_words_stand_out_from_what_is_behind_them(
    browser: Browser, pages: dict[str, Path], kind: str, scheme: str
) -> None:
    browser.open(pages[kind].as_uri(), scheme=scheme)
    browser.run("document.querySelectorAll('details').forEach(each => each.open = true)")
    found = json.loads(browser.run(CONTRASTS))
    assert len(found) > 100
    bad = [(ratio, words) for ratio, words in found if ratio < 4.5]
    assert not bad, bad[:5]


#: Contrast (WCAG 2.2, 1.4.3) of every text with the colour behind it: in a chart that of the page or, for the labels in
#: bars, that of the bar.
CONTRASTS = """(() => {
    const rgb = c => c.match(/[0-9.]+/g).map(Number);
    const light = c => rgb(c).slice(0, 3).map(v => v / 255)
        .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
        .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
    const behind = element => {
        for (let e = element; e; e = e.parentElement) {
            const colour = getComputedStyle(e).backgroundColor;
            if (rgb(colour)[3] !== 0) return colour;
        }
        return 'rgb(255, 255, 255)';
    };
    const found = [];
    for (const e of document.querySelectorAll('body *')) {
        if (e.tagName === 'SCRIPT' || ![...e.childNodes].some(n => n.nodeType === 3 && n.data.trim())) continue;
        if (!e.getClientRects().length) continue;
        const isDrawn = e.tagName === 'text', isInBar = isDrawn && getComputedStyle(e).fill === 'rgb(16, 21, 27)';
        const fill = isInBar ? e.closest('svg').querySelector('.mark-rect path') : null;
        const style = getComputedStyle(e), front = isDrawn ? style.fill : style.color;
        const back = fill ? getComputedStyle(fill).fill : behind(e);
        const [p, q] = [light(front), light(back)].sort((m, n) => n - m);
        found.push([(p + 0.05) / (q + 0.05), e.textContent.slice(0, 40)]);
    }
    return JSON.stringify(found);
})()"""


@pytest.mark.parametrize("kind", ["pipeline", "compared", "plan"])
def test_a_keyboard_reaches_everything_in_order(browser: Browser, pages: dict[str, Path], kind: str) -> None:
    browser.open(pages[kind].as_uri(), width=360)
    count = browser.run("document.querySelectorAll('a, summary, [tabindex=\"0\"]').length")
    seen: list[dict[str, Any]] = []
    for _ in range(count):
        browser.press("Tab")
        reached = json.loads(browser.run(FOCUSED))
        if reached["tag"] == "BODY" or (seen and reached["index"] == seen[0]["index"]):
            break  # behind the last one
        seen.append(reached)
    assert seen[0]["text"] == "Skip to the content"
    assert seen[0]["top"] >= 0
    assert [each["index"] for each in seen] == sorted({each["index"] for each in seen})
    shown = browser.run(
        "[...document.querySelectorAll('a, summary, [tabindex=\"0\"]')].filter(e => e.checkVisibility()).length"
    )
    assert len(seen) == shown
    assert all(each["outline"] >= 2 for each in seen)
    assert all(each["named"] for each in seen)
    browser.open(pages[kind].as_uri(), width=360)
    browser.press("Tab")
    browser.press("Enter")
    assert browser.run("document.activeElement.tagName") == "MAIN"


FOCUSED = """(() => {
    const e = document.activeElement, all = [...document.querySelectorAll('*')];
    return JSON.stringify({
        index: all.indexOf(e), tag: e.tagName, text: e.textContent, top: e.getBoundingClientRect().top,
        outline: parseFloat(getComputedStyle(e).outlineWidth),
        named: Boolean(e.textContent.trim() || e.getAttribute('aria-label')),
    });
})()"""


@pytest.mark.parametrize("kind", KINDS)
def test_a_screen_reader_finds_landmarks_headings_tables_and_names(
    browser: Browser, pages: dict[str, Path], kind: str
) -> None:
    browser.open(pages[kind].as_uri())
    browser.run("document.querySelectorAll('details').forEach(each => each.open = true)")
    browser.call("Accessibility.enable")
    nodes = [n for n in browser.call("Accessibility.getFullAXTree")["nodes"] if not n["ignored"]]
    roles: dict[str, list[str]] = {}
    for node in nodes:
        roles.setdefault(node["role"]["value"], []).append(node.get("name", {}).get("value", ""))
    assert all(len(roles.get(role, [])) == 1 for role in ("banner", "navigation", "main", "contentinfo")), roles.keys()
    pictures = roles["image"] if "image" in roles else roles["img"]
    assert all(len(name) > 15 for name in pictures)
    assert len(roles["region"]) >= len(browser.run("[...document.querySelectorAll('main section')].map(e => 1)"))
    assert all(roles["region"])
    assert all(roles["table"])
    levels = browser.run("[...document.querySelectorAll('h1, h2, h3, h4')].map(e => Number(e.tagName[1]))")
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(level <= before + 1 for before, level in itertools.pairwise(levels))
    assert browser.run("document.querySelectorAll('th:not([scope])').length") == 0
    assert browser.run("document.documentElement.lang") == "en"


@pytest.mark.parametrize("kind", KINDS)
def test_it_prints_on_pages_without_what_only_a_screen_can_do(
    browser: Browser, pages: dict[str, Path], kind: str
) -> None:
    browser.open(pages[kind].as_uri(), width=718, media="print", scheme="dark")  # A4 between margins of a centimetre
    assert browser.run("getComputedStyle(document.documentElement).backgroundColor") == "rgb(255, 255, 255)"
    assert browser.run("document.querySelector('nav').checkVisibility()") is False
    assert browser.run("[...document.querySelectorAll('summary')].filter(e => e.checkVisibility()).length") == 0
    assert (
        browser.run("[...document.querySelectorAll('svg')].filter(e => e.getBoundingClientRect().width > 718).length")
        == 0
    )
    printed = base64.b64decode(browser.call("Page.printToPDF", paperWidth=8.27, paperHeight=11.69)["data"])
    assert printed.startswith(b"%PDF")
    assert 1 <= len(re.findall(rb"/Type\s*/Page\b", printed)) <= 12


def cells(browser: Browser, caption: str) -> list[list[str]]:
    """The body of the table with this caption."""
    return browser.run(
        "[...[...document.querySelectorAll('table')].find(t => t.caption.textContent.startsWith("
        f"{json.dumps(caption)})).tBodies[0].rows].map(r => [...r.cells].map(c => c.textContent))"
    )


def test_every_figure_is_that_of_the_files(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["run"].as_uri())
    folder = pages["run"].with_suffix("")
    held = {record["step"]: record for record in records(folder)}
    summary = json.loads((folder / "summary.json").read_text())
    shown = dict(
        browser.run(
            "[...document.querySelectorAll('.tiles dt')].map(e => [e.textContent, e.nextSibling.firstChild.data])"
        )
    )
    mean = sum(record["step_time_s"] for record in list(held.values())[3:]) / 57
    assert shown == {
        "steps": "60",
        "training loss": f"{summary['final_loss']:.4f}",
        "held-out loss": f"{summary['eval_loss_final']:.4f}",
        "tokens per second": "4,568",
        "time of a step": f"{1000 * mean:.3g} ms",
        "peak memory": "40.9 MB",
    }
    for caption, key in (
        ("Loss,", "loss"),
        ("Learning rate,", "lr"),
        ("Throughput", "tokens_per_s"),
        ("Gradient norm", "grad_norm"),
        ("Time of a step,", "step_time_s"),
    ):
        rows = cells(browser, caption)
        assert len(rows) == 12
        assert [rows[0][0], rows[-1][0]] == ["1", "60"]
        assert [[step, value] for step, value in rows] == [[step, f"{held[int(step)][key]:.6g}"] for step, _ in rows]
    assert cells(browser, "Held-out loss") == [
        ["0", "5.3562"],
        *([str(step), f"{held[step]['eval_loss']:.6g}"] for step in (20, 40, 60)),
    ]
    names = [name for name, count in BYTES.items() if count]
    assert {row[0]: row[2] for row in cells(browser, "Bytes of tensors by category")} == {
        **{name: f"{BYTES[name]:,}" for name in names},
        "sum": f"{sum(BYTES.values()):,}",
        "measured peak": "40,858,456",
    }
    assert cells(browser, "What the planner said")[0] == [
        "peak memory of tensors",
        size(sum(BYTES.values())),
        "40.9 MB",
        "1.00",
    ]
    data = sum(held[step]["data_time_s"] for step in range(4, 61)) / 57
    total = sum(held[step]["step_time_s"] for step in range(4, 61)) / 57
    parts = {row[0]: row[2] for row in cells(browser, "Parts of a step, measured")}
    assert parts["data"] == f"{data / total:.1%}"
    assert parts["whole"] == "100.0%"
    assert cells(browser, "Parts of a step, predicted") == [
        ["compute", "200 ms", "83.3%"],
        ["exposed gather", "30 ms", "12.5%"],
        ["optimizer", "10 ms", "4.2%"],
        ["whole", "240 ms", "100.0%"],
    ]
    assert cells(browser, "Bytes by category and moment") == [
        ["1. forward", "2.0 MB", "9.0 MB", "11.0 MB"],
        ["2. end", "2.0 MB", "0 B", "2.0 MB"],
    ]
    assert cells(browser, "Streams:") == [["compute", "200 ms", "87.0%"], ["all-gather", "50 ms", "21.7%"]]
    over_time = cells(browser, "Bytes over a step")
    assert over_time[0] == ["0.0", "2.0 MB", "3.0 MB", "5.0 MB", "0 B", "10.0 MB"]
    assert ["150.0", "2.0 MB", "3.0 MB", "5.0 MB", "15.0 MB", "25.0 MB"] in over_time
    assert cells(browser, "Parts of the run") == [
        ["start and the rest", "4.5 s", "15.0%"],
        ["steps", "20 s", "66.7%"],
        ["held-out loss", "4 s", "13.3%"],
        ["checkpoints", "1.5 s", "5.0%"],
        ["whole", "30 s", "100.0%"],
    ]
    assert ["optimizer.lr", "0.002"] in cells(browser, "config.yaml")
    assert ["cuda", "none"] in cells(browser, "Where the run was made")
    assert cells(browser, "Elements of each unit")[0] == ["root", "198,272", "99,136 (50.0%)", "99,136 (50.0%)"]


def test_what_the_mouse_rests_on_says_its_value(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["run"].as_uri())
    place = "[...document.querySelectorAll('.chart')].find(c => c.ariaLabel.startsWith('Bytes of the fullest rank'))"
    x, y = browser.run(
        f"(() => {{ const c = {place}; c.scrollIntoView(); const b = c.querySelector('.mark-rect path')"
        ".getBoundingClientRect(); return [b.left + b.width / 2, b.top + b.height / 2]; })()"
    )
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    assert browser.run(f"{place}.querySelector('div').title") == f"parameters: {size(BYTES['parameters'])}"
