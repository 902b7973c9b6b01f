from __future__ import annotations

import psutil
import pytest
import torch

from draftsmith.errors import ConfigError
from draftsmith.plan.hardware import known_card, parse_hardware, this_machine, visible_hardware


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
        ("8xh100@1.2.3", "isn't like 8xh100"),
        ("h100@.", "isn't like 8xh100"),
        ("8x0GB", "a card of 0 GB holds nothing"),
    ],
)
def test_what_isnt_hardware_is_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_hardware(text)


@pytest.mark.parametrize("gbps", [0.0, float("nan")])
def test_a_link_of_nothing_is_refused(gbps: float) -> None:
    with pytest.raises(ConfigError, match=f"--link-gbps {gbps:g} is not above 0"):
        parse_hardware("h100", link_gbps=gbps)


@pytest.mark.parametrize(
    ("name", "gib", "card"),
    [
        ("NVIDIA H200", 139.8, "h200"),
        ("NVIDIA H100 80GB HBM3", 79.1, "h100"),
        ("NVIDIA A100-SXM4-80GB", 79.2, "a100"),
        ("NVIDIA A100-PCIE-40GB", 39.4, "a100-40gb"),
        ("NVIDIA GeForce RTX 4090", 23.5, "rtx4090"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 94.9, "rtx-pro-6000"),
        ("NVIDIA L40S", 44.4, "l40s"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 15.6, None),
        ("NVIDIA H100 NVL", 93.1, None),
        ("NVIDIA GH200 480GB", 94.5, None),
        ("NVIDIA GH200 144G HBM3e", 139.8, None),
        ("NVIDIA L40", 44.4, None),
        ("Tesla V100-SXM2-16GB", 15.8, None),
    ],
)
def test_cards_are_known_by_the_drivers_name_and_their_memory(name: str, gib: float, card: str | None) -> None:
    memory = round(gib * 2**30)
    found = known_card(name, memory)
    assert (found and found.name) == card
    if found is not None:
        assert found.memory == memory
        assert found.tflops == parse_hardware(found.name).card.tflops


def test_a_cpu_is_measured_and_shared_by_its_workers() -> None:
    hardware = visible_hardware(3, 2, torch.device("cpu"), seconds=0.2)
    assert (hardware.num_gpus, hardware.card.source) == (6, "measured now")
    assert 0 < hardware.card.tflops < 100
    assert 0 < hardware.card.bandwidth < 10
    assert hardware.card.memory * 3 <= psutil.virtual_memory().total
    assert not hardware.card.fp8


@pytest.mark.gpu
def test_a_visible_gpu_has_the_plans_rate_or_a_measured_one() -> None:
    card = visible_hardware(2, 1, torch.device("cuda", 0), seconds=0.5).card
    assert card.source == "measured now" or card.tflops == parse_hardware(card.name).card.tflops


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure")
def test_measuring_needs_a_gpu() -> None:
    with pytest.raises(ConfigError, match="--measure needs a GPU"):
        this_machine()


@pytest.mark.gpu
def test_measuring_a_gpu() -> None:
    assert this_machine(seconds=0.2).card.tflops > 10
