"""What a person is shown besides the live view."""

from __future__ import annotations

import io

from rich.console import Console

from draftsmith.pipeline.resolve import Choices
from draftsmith.pipeline.show import ProgressView, print_choices, train_text


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_every_choice_stands_with_its_reason() -> None:
    choices = Choices()
    choices.note("token budget", 49_152, "on a GPU")
    choices.note("taps", [1, 9], "given")
    console = Console(file=io.StringIO(), width=100)
    print_choices(console, choices)
    for shown in ("token budget", "49,152", "on a GPU", "[1, 9]", "given"):
        assert shown in written(console)


def test_progress_prints_some_lines_where_there_is_no_terminal() -> None:
    console = Console(file=io.StringIO(), width=100)
    with ProgressView(console, "capturing", 100) as view:
        for done in range(1, 101):
            view.update(done, f"{done} tokens/s")
    lines = written(console).strip().splitlines()
    assert 15 <= len(lines) <= 21
    assert lines[-1] == "capturing 100/100  100 tokens/s"


def test_the_numbers_beside_a_bar() -> None:
    line = {"loss": 1.5, "uniform_tau": 2.0, "tau": 1.9, "labels_per_s": 1234.0, "skipped": 1}
    assert train_text(line) == "loss 1.500  tau~2.00  tau 1.90  1,234 labels/s  [red]1 skipped[/red]"
    assert train_text({"loss": None}) == ""
