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
KINDS = ("run", "pipeline", "compared", "plan", "streams")


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
    assert browser.run(CLIPPED) == []
    assert browser.said() == []


#: Elements that reach beyond the window, but for those inside of what scrolls.
OUTSIDE = """[...document.querySelectorAll('main *, header *, footer *')]
    .filter(e => !e.closest('.scroll, pre') && e.getBoundingClientRect().right > innerWidth + 0.5)
    .map(e => e.outerHTML.slice(0, 80))"""
#: Labels of charts that lie on each other: two texts of one picture whose boxes overlap by more than a pixel or two.
CLIPPED = """[...document.querySelectorAll('svg.chart, svg.bars, svg.picture')].flatMap(svg => {
    const texts = [...svg.querySelectorAll('text')].filter(t => t.getClientRects().length && !t.closest('.stretched'));
    const boxes = texts.map(t => [t, t.getBoundingClientRect()]).filter(([t, b]) => b.width);
    return boxes.flatMap(([t, a], i) => boxes.slice(i + 1)
        .filter(([u, b]) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 2
            && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 3)
        .map(([u, b]) => t.textContent + ' | ' + u.textContent));
})"""


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


#: Contrast (WCAG 2.2, 1.4.3) of every text with the box that is drawn behind its middle, or the page.
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
        if (![...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()) || e.tagName === 'title') continue;
        if (!e.getClientRects().length) continue;
        const isDrawn = e.tagName === 'text', a = e.getBoundingClientRect();
        let back = behind(e);
        if (isDrawn && e.classList.contains('on')) {
            const x = a.left + a.width / 2, y = a.top + a.height / 2;
            const svg = e.closest('svg.picture, svg.bars, svg.chart');
            const under = [...svg.querySelectorAll('rect:not(.over), path.seam')].filter(r => {
                const b = r.getBoundingClientRect();
                return b.left <= x && x <= b.right && b.top <= y && y <= b.bottom;
            });
            if (!under.length) { found.push([0, 'nothing behind ' + e.textContent]); continue; }
            back = getComputedStyle(under.at(-1)).fill;
        }
        const style = getComputedStyle(e), front = isDrawn ? style.fill : style.color;
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
    assert browser.run("[...document.querySelectorAll('svg')].filter(e => e.clientWidth > 718).length") == 0
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
        ["steps", "20 s", "66.7%"],
        ["held-out loss", "4 s", "13.3%"],
        ["checkpoints", "1.5 s", "5.0%"],
        ["start and the rest", "4.5 s", "15.0%"],
        ["whole", "30 s", "100.0%"],
    ]
    assert ["optimizer.lr", "0.002"] in cells(browser, "config.yaml")
    assert ["cuda", "none"] in cells(browser, "Where the run was made")
    assert cells(browser, "Elements of each unit")[0] == ["root", "198,272", "99,136", "99,136"]


def test_curves_lie_where_their_values_belong(browser: Browser, pages: dict[str, Path]) -> None:
    """The points of each curve, read back through the ticks of its axes."""
    browser.open(pages["run"].as_uri())
    held = records(pages["run"].with_suffix(""))
    factors = {"k": 1e3, "M": 1e6, "ms": 1e-3, "s": 1.0, "µs": 1e-6, "": 1.0}

    def value(text: str) -> float:
        number = re.match(r"[-+0-9.e]+", text)
        assert number is not None
        return float(number.group()) * factors[text[number.end() :].strip()]

    charts = json.loads(browser.run(CURVES))
    for title, key in (
        ("Loss", "loss"),
        ("Learning rate", "lr"),
        ("Throughput", "tokens_per_s"),
        ("Gradient norm", "grad_norm"),
        ("Time of a step", "step_time_s"),
    ):
        chart = next(chart for chart in charts if chart["title"].startswith(title))
        ticks = [(value(text), y) for text, y in chart["ticks"]]
        (low, y_low), (high, y_high) = ticks[0], ticks[-1]
        left = 0 if key == "loss" else 1  # the held-out loss begins before the first step
        points = [
            (left + (60 - left) * x / 1000, low + (high - low) * (y - y_low) / (y_high - y_low))
            for x, y in chart["points"]
        ]
        assert len(points) == len(held)
        for (x, y), record in zip(points, held, strict=True):
            assert x == pytest.approx(record["step"], abs=0.01)
            assert y == pytest.approx(record[key], abs=0.002 * (high - low))


#: Of every chart its title, its vertical ticks with their places, and the points of its first curve.
CURVES = """JSON.stringify([...document.querySelectorAll('svg.chart')].map(svg => ({
    title: svg.querySelector('title').textContent,
    ticks: [...svg.querySelectorAll('text')].filter(t => t.getAttribute('x') === '-6')
        .map(t => [t.textContent, Number(t.getAttribute('y')) - 4]),
    points: (svg.querySelector('path.curve')?.getAttribute('d') ?? '').split(/[ML]/).slice(1)
        .map(p => p.split(' ').map(Number)),
})))"""


def test_shares_of_a_bar_are_those_of_the_memory(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["run"].as_uri())
    parts = browser.run(
        "[...[...document.querySelectorAll('svg.bars')][0].querySelectorAll('rect.seam')]"
        ".map(r => [r.querySelector('title').textContent.split(':')[0], r.getBoundingClientRect().width])"
    )
    widths = dict(parts)
    whole = sum(width for name, width in parts if name != "measured")
    assert widths.keys() - {"measured"} == {name for name, count in BYTES.items() if count}
    for name, width in widths.items():
        part = 40_858_456 if name == "measured" else BYTES[name]
        assert width / whole == pytest.approx(part / sum(BYTES.values()), abs=0.002)


def test_areas_of_a_step_are_as_high_as_their_bytes(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["run"].as_uri())
    areas = dict(
        browser.run(
            "[...document.querySelectorAll('path.seam')].map(p => [p.querySelector('title').textContent,"
            " p.getBoundingClientRect().height])"
        )
    )
    whole = areas["activations and other tensors of the step"]
    assert areas["parameters"] / whole == pytest.approx(2 / 15, abs=0.02)
    assert areas["optimizer"] / whole == pytest.approx(5 / 15, abs=0.02)
