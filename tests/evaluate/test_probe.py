"""The record that travels with an export."""

from __future__ import annotations

import json

import pytest
import torch

from draftsmith.evaluate.probe import Probe, described, noise, probe_output, sketch, trained_record
from tests.evaluate.overfit import drafter_config, random_drafter
from tests.families import tiny_target


def test_a_sketch_sees_every_component() -> None:
    output = torch.randn(4, 32)
    before = torch.tensor(sketch(output))
    for component in range(32):
        changed = output.clone()
        changed[2, component] += 0.1
        gap = (torch.tensor(sketch(changed)) - before).abs().max(1).values
        assert gap[2] > 1e-3
        assert float(gap[[0, 1, 3]].max()) < 1e-6


@pytest.mark.parametrize(("rows", "columns", "seed"), [(64, 96, 1.0), (16, 4096, 2.0), (512, 8, 3.0)])
def test_noise_is_spread_like_noise(rows: int, columns: int, seed: float) -> None:
    values = noise(rows, columns, seed)
    assert abs(float(values.mean())) < 0.05
    assert abs(float(values.std()) - 1) < 0.05
    # Rows are not copies of each other.
    assert float(torch.corrcoef(values[:8])[0, 1:].abs().max()) < 0.9


def test_noise_never_changes() -> None:
    """Records of earlier versions stay comparable: these numbers are part of the format."""
    assert [round(value, 4) for value in noise(1, 3, 1.0)[0].tolist()] == [-0.4402, 1.6693, 1.1325]


def test_the_record_is_json_and_its_config_is_as_read_back() -> None:
    config = drafter_config(tiny_target("llama"))
    drafter = random_drafter(config)
    record = trained_record(config, dict(drafter.named_parameters()))
    assert json.loads(json.dumps(record)) == record
    assert record["drafter"] == described(config)
    torch.testing.assert_close(torch.tensor(record["probe"]), torch.tensor(sketch(probe_output(drafter))))
    assert Probe.of(config).features_TFH.shape == (64, 96)
