from __future__ import annotations

from dataclasses import replace
from io import StringIO

from rich.console import Console

from draftsmith.plan.hardware import parse_hardware
from draftsmith.plan.make import Asked, make_plan
from draftsmith.plan.show import hours, print_plan
from draftsmith.plan.workload import Job


def shown(job: Job, hardware: str, hosts: int = 1, asked: Asked | None = None) -> str:
    console = Console(file=StringIO(), width=140)
    print_plan(make_plan(job, parse_hardware(hardware, hosts), asked or Asked()), console)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_every_buffer_and_change_is_on_the_page(reference: Job) -> None:
    text = shown(reference, "7xh200")
    for name in ("masters", "moments", "logits chunk", "target weights", "ring", "CUDA context", "twice the anchors"):
        assert name in text
    assert "a draw takes 47" in text.replace("\n", " ")
    assert "\nfits on 7 x h200 (" in text
    assert "1,024 anchors" in text
    assert "tokens is drawn from" in text


def test_cards_without_peers_say_what_the_host_holds(reference: Job) -> None:
    assert "pinned, the rings between the GPUs" in shown(reference, "2xrtx-pro-6000", asked=Asked(targets=1))


def test_hosts_say_what_the_network_carries(reference: Job) -> None:
    text = shown(reference, "8xh100", hosts=2, asked=Asked(targets=11))
    assert "what host 0 sends takes" in text
    assert "GB/s of its link's 50 GB/s" in text
    assert "network:" not in shown(reference, "8xh100", hosts=2, asked=Asked(joint=True))


def test_a_plan_that_doesnt_fit_says_so(reference: Job) -> None:
    assert "\ndoesn't fit on 2 x rtx3090 (" in shown(reference, "2xrtx3090")


def test_hours_are_said_as_people_do() -> None:
    assert (hours(0.5), hours(3), hours(72)) == ("30 minutes", "3.0 hours", "3.0 days")
    assert (hours(0.001), hours(1 / 60)) == ("under a minute", "1 minute")
    assert hours(0.999) == "1.0 hours"


def test_features_from_disk_say_what_is_read(reference: Job) -> None:
    text = shown(reference, "2xh100", asked=Asked(from_disk=True))
    assert "GB/s to be read" in text
    assert "target weights" not in text


def test_a_number_of_steps_is_said_instead_of_epochs(reference: Job) -> None:
    assert "1,200 steps" in shown(replace(reference, max_steps=1200), "h200")


def test_it_fits_a_narrow_terminal(reference: Job) -> None:
    console = Console(file=StringIO(), width=80)
    print_plan(make_plan(reference, parse_hardware("7x96GB"), Asked(targets=5)), console)
    assert isinstance(console.file, StringIO)
    assert "\N{HORIZONTAL ELLIPSIS}" not in console.file.getvalue()


def test_one_gpu_does_both_in_turns(reference: Job) -> None:
    verdict = shown(reference, "h200").splitlines()[-1]
    assert verdict == "fits on 1 x h200 (149 GB, 669 TFLOP/s): both roles in turns"
    assert shown(reference, "2xh200", asked=Asked(joint=True)).splitlines()[-1].endswith("both roles on every GPU")


def test_changes_stand_beside_the_plan_itself(reference: Job) -> None:
    plan = make_plan(reference, parse_hardware("7xh200"), Asked(targets=6))
    rows = shown(reference, "7xh200", asked=Asked(targets=6)).splitlines()
    first = rows[next(index for index, row in enumerate(rows) if row.startswith("choice")) + 1]
    assert first.startswith("as planned")
    assert f"6T 1D{plan.split.rate:>12,.0f}".replace(" ", "") in first.replace(" ", "")


def test_small_numbers_are_not_nothing(tiny: Job, reference: Job) -> None:
    text = shown(tiny, "h200")
    assert "under a minute" in text
    assert "(0 GPU-hours)" not in text
    assert "0.00B" not in text
    assert "1.73B parameters" in shown(reference, "h200")
