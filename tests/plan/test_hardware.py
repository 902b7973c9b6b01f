from __future__ import annotations

import pytest
import torch

from draftsmith.errors import ConfigError
from draftsmith.plan.hardware import parse_hardware, this_machine


def test_names_counts_and_rates() -> None:
    assert parse_hardware("8xh100").per_host == 8
    assert parse_hardware("H200").per_host == 1
    assert parse_hardware("a100-40gb").card.name == "a100-40gb"
    assert parse_hardware("2xh100@600").card.tflops == 600


def test_memory_alone_takes_the_rate_of_the_nearest_card() -> None:
    hardware = parse_hardware("7x96GB")
    assert hardware.per_host == 7
    assert hardware.card.memory == 96_000_000_000
    assert hardware.card.tflops == parse_hardware("rtx-pro-6000").card.tflops
    assert "assumed like rtx-pro-6000" in hardware.card.source
    assert not hardware.card.has_peers
    assert parse_hardware("7x96gb@250").card.tflops == 250


def test_hosts_multiply_and_the_link_is_bytes() -> None:
    hardware = parse_hardware("8xh100", hosts=8, link_gbps=400)
    assert hardware.num_gpus == 64
    assert hardware.link_bytes == 50e9
    assert hardware.describe().startswith("8 hosts of 8 x h100")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("8xh99", "no card named 'h99'"),
        ("", "isn't like 8xh100"),
        ("4 cards", "isn't like 8xh100"),
        ("h100@0", "a rate of 0 TFLOP/s"),
        ("0xh100", "1 hosts of 0 GPUs"),
    ],
)
def test_what_isnt_hardware_is_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_hardware(text)


def test_a_link_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="--link-gbps 0 is not above 0"):
        parse_hardware("h100", link_gbps=0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure")
def test_measuring_needs_a_gpu() -> None:
    with pytest.raises(ConfigError, match="--measure needs a GPU"):
        this_machine()


@pytest.mark.gpu
def test_measuring_a_gpu() -> None:
    assert this_machine(seconds=0.2).card.tflops > 10
