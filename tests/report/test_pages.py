"""Pages of runs of every kind: whole, killed, resumed, empty, of one step, of very many; and the verb for them."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from shardwise.cli import main
from shardwise.report import compare_page, read_run, run_page
from shardwise.report.element import el, html
from shardwise.report.streams import Span, innermost, streams_figure
from shardwise.report.warnings import warnings
from shardwise.sim.chrome import chrome_trace, slices_of
from shardwise.sim.streams import Task, run
from tests.report.folders import records, write_run


class Page(HTMLParser):
    """Ids, links, words and the nesting of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.tags: list[str] = []
        self.words: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
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
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def page_of(folder: Path) -> Page:
    text = run_page(read_run(folder))
    page = Page(text)
    assert len(page.ids) == len(set(page.ids))
    assert {link[1:] for link in page.links} <= set(page.ids)
    assert all(link.startswith("#") for link in page.links)
    assert "script" not in page.tags
    return page


def test_a_page_needs_nothing_and_allows_nothing(tmp_path: Path) -> None:
    text = run_page(read_run(write_run(tmp_path / "run")))
    page = Page(text)
    policy = next(
        value for tag, name, value in page.attributes if tag == "meta" and name == "content" and "none" in value
    )
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    style = re.search(r"<style>(.*?)</style>", text, re.DOTALL)
    assert style is not None
    assert base64.b64encode(hashlib.sha256(style.group(1).encode()).digest()).decode() in policy
    assert not [name for _, name, _ in page.attributes if name == "style" or name.startswith("on")]
    loads = {"src", "srcset", "data", "poster", "action", "background"}
    assert not [name for _, name, _ in page.attributes if name in loads]
    assert "http://" not in style.group(1)
    assert "@import" not in style.group(1)
    assert len(text.encode()) < 80_000


def test_words_of_a_run_stay_words(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script><img src=x onerror=alert(2)>&amp;\"'\x1b[31m\u202e"
    folder = write_run(tmp_path / "run", name=evil, reason=evil, exit_code=1)
    (folder / "model.txt").write_text(f"</pre></section>{evil}")
    plan = json.loads((folder / "plan.json").read_text())
    plan["units"][0]["name"] = evil
    (folder / "plan.json").write_text(json.dumps(plan))
    page = page_of(folder)
    assert "img" not in page.tags
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
    assert "circle" in one.tags
    resumed = page_of(write_run(tmp_path / "resumed", first=301))
    assert "The first recorded step is 301: what came before is not in metrics.jsonl." in resumed.text
    again = read_run(write_run(tmp_path / "again", timed_steps=7))
    assert [record["step"] for record in again.steady] == list(range(54, 61))
    assert "Measured: mean of 7 steps. 53 before them are left out." in Page(run_page(again)).text


def test_what_went_wrong_is_said_before_the_figures(tmp_path: Path) -> None:
    fine = read_run(write_run(tmp_path / "fine", predicted_step_time_s=0.22, step_time_s=0.225))
    assert warnings(fine) == []
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
    assert warnings(read_run(folder)) == sentences
    assert " ".join(sentences) in page_of(folder).text
    assert f"Note on A: {sentences[0]}" in Page(compare_page([read_run(folder), fine])).text


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
    summary = json.loads((folder / "summary.json").read_text())
    for odd in ("<script>", [], None, True):
        plan = {"predicted_bytes_per_rank": {"parameters": odd, "optimizer": 5e6}, "units": [odd]}
        (folder / "plan.json").write_text(json.dumps(plan))
        (folder / "summary.json").write_text(json.dumps(dict.fromkeys(summary, odd)))
        assert "training loss" in page_of(folder).text


def test_losses_that_are_no_numbers_break_the_line(tmp_path: Path) -> None:
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
    curve = next(
        value for tag, name, value in page.attributes if (tag, name) == ("path", "d") and value.count("M") == 2
    )
    assert "nan" not in curve
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line | {"loss": None}) + "\n" for line in lines))
    assert page_of(folder).text


def test_a_hundred_thousand_steps_make_a_small_page(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=3)
    line = records(folder)[2]
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, 100_001):
            record = line | {"step": step, "loss": 2 + (step * 7919 % 1000) / 1000, "grad_norm": step * 31 % 77}
            file.write(json.dumps(record) + "\n")
    text = run_page(read_run(folder))
    assert len(text.encode()) < 400_000
    assert "100,000" in text


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
    shown = streams_figure(
        [Span("gather", 0, 3, "a"), Span("gather", 1, 4, "b"), Span("compute", 0, 5, "c")], "x", waits={}
    )
    assert "all-gather4 s80.0%" in "".join(Page(html(el("div", shown))).words)  # overlapping spans count once
    (folder / "profile" / "rank-0.json").write_text('{"traceEvents": [{"ph": "X"}]}')
    assert "Measured streams: no steps were profiled" in page_of(folder).text


def test_the_pipeline_is_drawn(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path / "run", pp=2, strategy="zero1"))
    assert "Schedule 1f1b of 2 ranks and 4 microbatches: a rank is idle for 20.0% of the step." in page.text
    assert page.words.count("F0") == page.words.count("B3") == 2


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
