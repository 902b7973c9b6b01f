from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from draftsmith.report.page import evaluation_rows, run_part, short, verdict, write_report
from draftsmith.report.runs import Run, read_run
from tests.report.made_up import summary, write_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return read_run(write_run(tmp_path / "a", gpus=1), "a <run>")


def test_the_page_holds_all_it_needs(run: Run, tmp_path: Path) -> None:
    written = write_report([run], tmp_path / "out" / "page.html", {"a <run>": "draftsmith train --target t"})
    page = written[0].read_text()
    assert page.count("<svg") == 13
    assert "http" not in page.replace("http://www.w3.org", "")  # self-contained
    assert "prefers-color-scheme: dark" in page
    assert "a &lt;run&gt;" in page
    assert "<run>" not in page
    assert "draftsmith train --target t" in page
    for text in ("skipped: no assistant turn", "20,000 (60% supervised)", "512 x 5", "3.40 [3.25, 3.60]", "torch"):
        assert text in page
    assert all(path.is_file() for path in written)
    assert {path.suffix for path in written[1:]} == {".png"}
    assert written[1].parent.name == "page_png"


@pytest.mark.parametrize("is_foreign", [True, False])
def test_whose_answers_they_were_is_shown_and_said_where_foreign(is_foreign: bool, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    found = {
        "verdict": "mean 0.6: regenerate <them>", "is_foreign": is_foreign, "num_rows": 200, "num_tokens": 51_234,
        "mean": 0.6, "standard_error": 0.01, "share_foreign": 0.9, "gaps": [0.6],
    }  # fmt: skip
    (folder / "on_policy.json").write_text(json.dumps(found))
    run = read_run(folder, "a")
    write_report([run], tmp_path / "page.html", {})
    page = (tmp_path / "page.html").read_text()
    assert "200 rows, 51,234 tokens; 90% look foreign" in page
    assert page.count("regenerate &lt;them&gt;") == (2 if is_foreign else 1)
    assert ("Of its data: mean 0.6" in verdict(run)) == is_foreign


def test_evaluation_shows_before_after_and_groups(run: Run) -> None:
    rows = evaluation_rows(run, many=False)
    assert [row[:2] for row in rows] == [("before", "all"), ("after", "all"), ("after", "code"), ("after", "chat")]
    assert rows[1][2:5] == ("3.00 [2.85, 3.20]", "3.05", "1.50x")
    assert evaluation_rows(run, many=True)[0][0] == "a <run>, before"


def test_the_verdict_says_what_the_intervals_allow(run: Run, tmp_path: Path) -> None:
    assert verdict(run).startswith("Training made the drafter better: tau 1.50 before, 3.00 after")

    def with_after(tau: float) -> Run:
        copy = read_run(write_run(tmp_path / f"t{tau}"), "t")
        return Run(
            **{name: getattr(copy, name) for name in Run.__dataclass_fields__ if name != "evaluation"},
            evaluation={"before": {"summary": summary(1.5)}, "after": {"summary": summary(tau)}},
        )

    assert verdict(with_after(1.6)).startswith("No difference beyond the intervals")
    assert verdict(with_after(1.0)).startswith("Training made the drafter worse")


def test_a_drafter_that_slows_decoding_down_is_said_to(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "slow")
    body = {"after": {"summary": summary(2.2, plain=40.0)}}
    (folder / "evaluation.json").write_text(json.dumps(body))
    assert verdict(read_run(folder, "slow")).startswith(
        "On this machine drafting is slower than plain decoding (0.75x)"
    )


def test_a_run_without_plain_decoding_or_evaluation_has_dashes_or_nothing(tmp_path: Path) -> None:
    bare = read_run(write_run(tmp_path / "b", evaluated=False), "b")
    assert verdict(bare) == ""
    assert evaluation_rows(bare, many=False) == []
    assert "speed-up" not in {number.name for number in run_part(bare, "").numbers}


def test_utilisation_is_among_the_figures_to_see_first(run: Run, tmp_path: Path) -> None:
    def shown(one: Run) -> list[tuple[str, str]]:
        return [(number.value, number.note) for number in run_part(one, "").numbers if number.name == "GPUs busy"]

    assert shown(run) == [("93%", "utilisation")]
    several = read_run(write_run(tmp_path / "g", gpus=3), "g")
    assert shown(several) == [("82%", "utilisation; least cuda:1, 70%")]
    assert shown(read_run(write_run(tmp_path / "t", gpus=2, told=False), "t")) == []
    assert shown(read_run(write_run(tmp_path / "c"), "c")) == []


def test_large_numbers_are_short() -> None:
    assert [short(value) for value in (12, 1500, 2.5e6, 3e9)] == ["12", "1.5K", "2.5M", "3.0B"]


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium to open the page in")
def test_a_browser_finds_the_figures_and_reports_no_error(run: Run, tmp_path: Path) -> None:
    page = write_report([run], tmp_path / "page.html", {})[0]
    assert CHROMIUM is not None
    done = subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
            f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", page.as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert done.stdout.count("<figure") == 13
    assert 'id="evaluation"' in done.stdout
    assert "CONSOLE" not in done.stderr
