"""Pages of runs of every kind: whole, killed, resumed, empty, of one step, of very many; and the verb for them."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from shardwise.cli import main
from shardwise.planner.estimate import Span
from shardwise.report import compare_page, read_run, run_page
from shardwise.report.parts import streams
from shardwise.report.run_page import innermost
from shardwise.sim.chrome import chrome_trace, slices_of
from shardwise.sim.streams import Task, run
from tests.report.folders import BYTES, records, write_run

VEGA = Path(__file__).parents[2] / "src" / "shardwise" / "report" / "vega"


class Page(HTMLParser):
    """Ids, links, words, scripts and the data of the charts of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.tags: list[str] = []
        self.words: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.code: list[tuple[str, str]] = []
        self.charts: list[dict[str, Any]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        found = dict(attrs)
        if found.get("id"):
            self.ids.append(str(found["id"]))
        if tag == "a":
            self.links.append(str(found["href"]))

    def handle_data(self, data: str) -> None:
        if self.cdata_elem is None:
            self.words.append(data)
        elif self.attributes[-1] == ("script", "type", "application/json"):
            self.charts.append(json.loads(data))
        else:
            self.code.append((self.cdata_elem, data))

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def page_of(folder: Path) -> Page:
    text = run_page(read_run(folder))
    page = Page(text)
    assert len(page.ids) == len(set(page.ids))
    assert {link[1:] for link in page.links} <= set(page.ids)
    assert all(link.startswith("#") for link in page.links)
    assert [tag for tag, _ in page.code] == ["style", *["script"] * 4]
    return page


def charts(page: Page, kind: str) -> list[dict[str, Any]]:
    """The data of the charts of one kind, in the order of the page."""
    return [chart for chart in page.charts if chart["kind"] == kind]


def test_a_page_needs_nothing_and_allows_nothing(tmp_path: Path) -> None:
    text = run_page(read_run(write_run(tmp_path / "run")))
    page = Page(text)
    policy = next(
        value
        for tag, name, value in page.attributes
        if tag == "meta" and name == "content" and value and "none" in value
    )
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy
    assert len(page.code) == 5
    for _, code in page.code:
        assert base64.b64encode(hashlib.sha256(code.encode()).digest()).decode() in policy
    style = page.code[0][1]
    assert not [name for _, name, _ in page.attributes if name == "style" or name.startswith("on")]
    loads = {"src", "srcset", "data", "poster", "action", "background"}
    assert not [name for _, name, _ in page.attributes if name in loads]
    assert "http://" not in style
    assert "@import" not in style
    assert len(text.encode()) < 900_000


def test_the_runtime_of_charts_is_the_published_one() -> None:
    rows = re.findall(r"^(\S+\.js) +\S+ \S+ +([0-9a-f]{64})$", (VEGA / "LICENSE.txt").read_text(), re.MULTILINE)
    assert {name for name, _ in rows} == {path.name for path in VEGA.glob("*.js")}
    assert {name: hashlib.sha256((VEGA / name).read_bytes()).hexdigest() for name, _ in rows} == dict(rows)


def test_charts_hold_the_values_of_the_files(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    page, held = page_of(folder), records(folder)
    for chart, key, factor in zip(
        charts(page, "lines"),
        ("loss", "lr", "tokens_per_s", "grad_norm", "step_time_s"),
        (1, 1, 1, 1, 1e3),
        strict=True,
    ):
        rows = [row for row in chart["rows"] if row["name"] != "held out"]
        assert [row["x"] for row in rows] == list(range(1, 61))
        assert [row["y"] for row in rows] == pytest.approx([record[key] * factor for record in held], rel=1e-5)
    held_out = [row["x"] for row in charts(page, "lines")[0]["rows"] if row["name"] == "held out" and row["is_marked"]]
    assert held_out == [0, 20, 40, 60]
    peak, step, whole = charts(page, "bars")
    parts = [(row["bar"], row["value"]) for row in peak["rows"]]
    assert [bar for bar, _ in parts] == ["predicted"] * 6 + ["measured"]
    counts = [*(count for count in BYTES.values() if count), 40_858_456]
    assert [value for _, value in parts] == pytest.approx([count / 1e6 for count in counts], rel=1e-5)
    assert [note["note"] for note in peak["notes"]] == ["40.8 MB", "40.9 MB"]
    assert [(row["text"], row["value"]) for row in step["rows"] if row["bar"] == "predicted"] == [
        ("compute: 200 ms", 200.0), ("exposed gather: 30 ms", 30.0), ("optimizer: 10 ms", 10.0),
    ]  # fmt: skip
    assert sum(row["value"] for row in whole["rows"]) == pytest.approx(30)
    moments, memory = charts(page, "columns")
    assert [(row["x"], row["value"], row["text"]) for row in moments["rows"]] == [
        (0.5, 2.0, "1. forward, parameters: 2.0 MB"),
        (0.5, 9.0, "1. forward, activations: 9.0 MB"),
        (1.5, 2.0, "2. end, parameters: 2.0 MB"),
    ]
    assert sum(row["value"] for row in memory["rows"] if row["x"] == 150.0) == pytest.approx(25.0)
    (lanes,) = charts(page, "lanes")
    assert [(row["lane"], row["x"], row["x2"], row["label"]) for row in lanes["rows"]] == [
        ("compute", 0.0, 100.0, "root"), ("compute", 130.0, 230.0, "blocks"), ("all-gather", 0.0, 50.0, "blocks"),
    ]  # fmt: skip


def test_words_of_a_run_stay_words(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script><img src=x onerror=alert(2)>&amp;\"'\x1b[31m\u202e"
    folder = write_run(tmp_path / "run", name=evil, reason=evil, exit_code=1)
    (folder / "model.txt").write_text(f"</pre></section>{evil}")
    plan = json.loads((folder / "plan.json").read_text())
    plan["units"][0]["name"] = evil
    (folder / "plan.json").write_text(json.dumps(plan))
    predicted = json.loads((folder / "predicted.json").read_text())
    predicted["spans"][0][3] = predicted["memory_timeline"][0][0] = evil
    (folder / "predicted.json").write_text(json.dumps(predicted))
    page = page_of(folder)
    assert "img" not in page.tags
    shown = "<script>alert(1)</script><img src=x onerror=alert(2)>&amp;\"'\\x1b[31m\\u202e"
    assert charts(page, "lanes")[0]["rows"][0]["text"] == f"compute {shown}: 100 ms"
    assert page.text.count("<script>alert(1)</script><img src=x onerror=alert(2)>&amp;\"'") >= 4
    assert "\x1b" not in page.text
    assert "\u202e" not in page.text


def test_a_killed_run_says_so_and_shows_what_there_is(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=7, exit_code=None)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "loss": 3.')
    page = page_of(folder)
    assert "No end is recorded: the run is still going, or it was killed. The newest recorded step is 7." in page.text
    assert "1 damaged line of metrics.jsonl left out" in page.text
    assert "Loss" in page.text


@pytest.mark.parametrize(
    "missing",
    ["metrics.jsonl", "plan.json", "config.yaml", "summary.json", "environment.json", "memory.json", "predicted.json"],
)
def test_any_file_may_be_missing_or_damaged(tmp_path: Path, missing: str) -> None:
    folder = write_run(tmp_path / "run")
    for content in ("", "{[\x00", "[]", "null", None):
        if content is None:
            (folder / missing).unlink()
        else:
            (folder / missing).write_text(content)
        page = page_of(folder)
        sentence = {
            "metrics.jsonl": "Training: no step has been recorded in metrics.jsonl.",
            "plan.json": "Mesh: plan.json holds none.",
            "config.yaml": "Configuration: the folder has no config.yaml.",
            "summary.json": "No end is recorded",
            "predicted.json": "Predicted time of a step: predicted.json does not hold it.",
            "memory.json": "Memory over a step: it is measured on CPUs in the second and third step",
            "environment.json": "Environment: the folder has no environment.json.",
        }[missing]
        assert sentence in page.text


def test_runs_of_no_step_and_of_one_step_and_resumed_ones(tmp_path: Path) -> None:
    assert "no step has been recorded" in page_of(write_run(tmp_path / "none", steps=0)).text
    one = page_of(write_run(tmp_path / "one", steps=1))
    assert "Measured: mean of 1 step. " in one.text
    assert [row["is_marked"] for row in charts(one, "lines")[1]["rows"]] == [True]
    resumed = page_of(write_run(tmp_path / "resumed", first=301))
    assert "The first recorded step is 301: what came before is not in metrics.jsonl." in resumed.text
    again = read_run(write_run(tmp_path / "again", timed_steps=7))
    assert [record["step"] for record in again.steady] == list(range(54, 61))
    assert "Measured: mean of 7 steps. 53 before them are left out." in Page(run_page(again)).text


def test_a_run_of_samples_without_tokens_shows_none(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=4, tokens_per_s=0.0)  # whose config.yaml has no data.seq_len
    assert "tokens per second" in page_of(folder).text
    lines = [{**record, "tokens": 0, "tokens_per_s": 0.0} for record in records(folder)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = page_of(folder).text
    assert "tokens" not in text.partition("Configuration")[0]
    assert "2 ranks, 8 samples a step" in text


def test_what_went_wrong_is_said_before_the_figures(tmp_path: Path) -> None:
    fine = read_run(write_run(tmp_path / "fine", predicted_step_time_s=0.22, step_time_s=0.225))
    assert fine.warnings() == []
    folder = write_run(
        tmp_path / "run", predicted_step_time_s=0.1, step_time_s=0.225, predicted_peak_memory_bytes=20_429_228,
        failed_saves=["step 20: the disk is full"],
    )  # fmt: skip
    lines = records(folder)
    for index, line in enumerate(lines):
        line["loss_scale"] = 65536.0
        line["grad_norm"] = float("inf") if index < 2 else line["grad_norm"]
    lines[4]["loss"] = float("nan")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    sentences = [
        "Loss scaling skipped 2 steps: a gradient was not finite.",
        "1 step recorded no finite loss.",
        "1 checkpoint could not be saved: step 20: the disk is full.",
        "Peak memory was 2.00 times the prediction.",
        "A step took 2.25 times the predicted time.",
    ]
    assert read_run(folder).warnings() == sentences
    assert " ".join(sentences) in page_of(folder).text
    assert f"Note on A: {sentences[0]}" in Page(compare_page([read_run(folder), fine])).text


def test_two_predictions_of_a_peak_are_told_apart(tmp_path: Path) -> None:
    text = page_of(write_run(tmp_path / "run")).text
    assert (
        "The peak is 11.0 MB, at moment 1, forward. The planner's formulas give these bytes. The predicted peak" in text
    )


def test_bytes_that_were_sent_are_beside_those_that_were_predicted(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    predicted = json.loads((folder / "predicted.json").read_text())
    (folder / "predicted.json").write_text(json.dumps(predicted | {"sent_bytes": 3_470_340}))
    assert "bytes that rank 0 sends in a step 3.5 MB 6.9 MB 2.00" in page_of(folder).text


def test_numbers_that_are_none_and_numbers_beyond_all_measure_make_a_page(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=6, final_loss=1e30)
    assert "1e+30" in page_of(folder).text
    (folder / "metrics.jsonl").write_text(
        "".join(
            json.dumps(line | {"step_time_s": 1e308, "loss": 1e30 + line["step"]}) + "\n" for line in records(folder)
        )
    )
    assert "1e+30" in page_of(folder).text
    memory = json.loads((folder / "memory.json").read_text())
    (folder / "memory.json").write_text(json.dumps(memory | {"seconds": [0.0] * 30 + [1e308]}))
    assert "Measured memory over a step" in page_of(folder).text
    summary = json.loads((folder / "summary.json").read_text())
    for odd in ("<script>", [], None, True, 10**400):
        unit = {"name": odd, "numel": odd, "owned": [odd]}
        plan = {"predicted_bytes_per_rank": {"parameters": odd, "optimizer": 5e6}, "mesh": {}, "units": [unit]}
        (folder / "plan.json").write_text(json.dumps(plan))
        (folder / "summary.json").write_text(json.dumps(dict.fromkeys(summary, odd)))
        page = page_of(folder)
        assert "training loss" in page.text
        assert "Who owns what: plan.json does not say." in page.text


def test_losses_that_are_no_numbers_break_the_line(tmp_path: Path) -> None:
    lost = write_run(tmp_path / "lost", exit_code=81, reason="dp_shard/0/gather #3 failed: [pair.cc:537] Read error")
    text = page_of(lost).text
    assert (
        "Ended with exit code 81 after step 60: another rank was lost, as rank 0 saw in dp_shard/0/gather #3." in text
    )
    assert "pair.cc" not in text
    folder = write_run(tmp_path / "run", exit_code=80, reason="step 41: the loss is nan")
    lines = records(folder)
    for line in lines[10:13]:
        line["loss"], line["grad_norm"] = None, float("nan")
    lines[20]["lr"] = float("inf")
    lines[21]["lr"] = "much"
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = page_of(folder)
    assert "Ended with exit code 80 after step 60: step 41: the loss is nan" in page.text
    assert "No finite value at 3 steps: the line is broken there." in page.text
    loss = [row["y"] for row in charts(page, "lines")[0]["rows"] if row["name"] == "training"]
    assert [loss[9], loss[11]] == pytest.approx([lines[9]["loss"], lines[13]["loss"]], rel=1e-5)
    assert loss[10] is None
    assert loss.count(None) == 1
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line | {"loss": None}) + "\n" for line in lines))
    assert page_of(folder).text


def test_very_many_steps_and_spans_and_a_large_schedule_make_a_page_of_less_than_2_mb(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=3, pp=8)
    plan = json.loads((folder / "plan.json").read_text())
    plan["batch"]["accumulation"] = 312
    (folder / "plan.json").write_text(json.dumps(plan))
    names = [{"name": "thread_name", "tid": tid, "args": {"name": f"stream {tid}"}} for tid in range(5)]
    spans = [{"ph": "X", "tid": at % 5, "ts": at, "dur": 4 + at % 3, "name": f"unit {at}"} for at in range(30_000)]
    (folder / "profile").mkdir()
    (folder / "profile" / "rank-0.json").write_text(json.dumps({"traceEvents": names + spans}))
    line = records(folder)[2]
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, 30_001):
            record = line | {"step": step, "loss": 2 + (step * 7919 % 1000) / 1000, "grad_norm": step * 31 % 77}
            file.write(json.dumps(record) + "\n")
    text = run_page(read_run(folder))
    assert len(text.encode()) < 2_000_000
    assert [len(chart["rows"]) for chart in charts(Page(text), "lanes")] == [3, pytest.approx(5000, rel=0.05), 4992]
    assert max(len(chart["rows"]) for chart in charts(Page(text), "lines")) <= 4 * 151
    assert "30,000" in text


def test_a_profile_is_drawn_where_there_is_one(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    assert "Measured streams: no steps were profiled" in page_of(folder).text
    timeline = run([Task("compute", 0.003, label="blocks.0"), Task("gather", 0.001, label="blocks.1")])
    (folder / "profile").mkdir()
    (folder / "profile" / "rank-0.json").write_text(chrome_trace({"rank 0, measured": slices_of(timeline)}))
    text = page_of(folder).text
    assert "Measured streams of rank 0: 2 streams over 3 ms." in text
    assert "compute 3 ms 100.0% all-gather 1 ms 33.3%" in text
    outer, first, second = (Span("compute", *at) for at in ((0.0, 9.0, "root"), (1.0, 2.0, "a"), (2.0, 8.0, "b")))
    assert innermost([second, outer, first]) == [first, second]
    shown = streams([Span("gather", 0, 3, "a"), Span("gather", 1, 4, "b"), Span("compute", 0, 5, "c")])
    assert shown is not None
    assert ("all-gather", "4 s", "80.0%") in shown["rows"]  # overlapping spans count once
    (folder / "profile" / "rank-0.json").write_text('{"traceEvents": [{"ph": "X"}]}')
    assert "Measured streams: no steps were profiled" in page_of(folder).text


def test_the_pipeline_is_drawn(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path / "run", pp=2, strategy="zero1"))
    assert "strategy zero1 pp=2, 4 ranks" in page.text
    assert "zero1 pp=2" in Page(compare_page([read_run(tmp_path / "run")])).text
    assert "Schedule 1f1b of 2 ranks and 4 microbatches: a rank is idle for 20.0% of the step." in page.text
    labels = [row["label"] for row in charts(page, "lanes")[-1]["rows"]]
    assert labels.count("F0") == labels.count("B3") == 2


def test_runs_are_compared_with_what_differs_between_them(tmp_path: Path) -> None:
    one = write_run(tmp_path / "a" / "run", seed=1)
    two = write_run(tmp_path / "b" / "run", seed=2, strategy="ddp", tokens_per_s=9999.5)
    dead = write_run(tmp_path / "dead", steps=0, exit_code=None)
    text = compare_page([read_run(folder) for folder in (one, two, dead)])
    page = Page(text)
    assert len(page.ids) == len(set(page.ids))
    for words in ("a/run", "b/run", "dead", "parallel.strategy zero3 ddp zero3", "train.seed 1 2 0", "10,000"):
        assert words in page.text
    assert "optimizer.lr" not in page.text
    assert "Environments that differ: none." in page.text
    for chart in charts(page, "lines"):  # the third run has no step, and keeps its colour
        assert (chart["names"], chart["drawn"]) == (["A", "B", "C"], ["A", "B"])
        assert {row["name"] for row in chart["rows"]} == {"A", "B"}


def test_the_verb_writes_the_page_and_refuses_what_is_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two, three = (str(write_run(tmp_path / name, seed=seed)) for seed, name in enumerate("abc"))
    assert main(["report", one]) == 0
    assert (tmp_path / "a" / "report.html").read_text() == run_page(read_run(tmp_path / "a"))
    assert main(["report", one, "--compare", two, three, "--out", str(tmp_path / "new" / "x.html")]) == 0
    assert "3 runs compared" in (tmp_path / "new" / "x.html").read_text()
    assert main(["report", one, "--compare", two, "--compare", three]) == 0
    assert "3 runs compared" in (tmp_path / "a" / "compare.html").read_text()
    capsys.readouterr()
    assert main(["report", str(tmp_path)]) == 78
    assert f"{tmp_path} holds no run.\n  Name a folder that `shardwise train` wrote." in capsys.readouterr().err
    assert main(["report", one, two]) == 78
    assert "a second run, but no --compare" in capsys.readouterr().err
