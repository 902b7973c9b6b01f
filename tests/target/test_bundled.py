from __future__ import annotations

import pytest

from draftsmith.errors import TargetError
from draftsmith.target.bundled import HUB_CONFIGS, config_folder, config_names
from draftsmith.target.model import TargetConfig, read_facts


def test_every_hub_id_points_to_a_bundled_config() -> None:
    assert set(HUB_CONFIGS.values()) == set(config_names())


@pytest.mark.parametrize("name", config_names())
def test_a_bundled_config_is_a_target(name: str) -> None:
    assert (config_folder(name) / "config.json").is_file()
    assert read_facts(TargetConfig(target=name)).reserved_token_ids


def test_an_unknown_one_is_refused_with_the_known_ones() -> None:
    with pytest.raises(TargetError, match="no bundled config configs/none: known are configs/qwen3-8b"):
        config_folder("configs/none")


def test_the_27b_config_is_the_hybrid_of_the_recipe() -> None:
    facts = read_facts(TargetConfig(target="configs/qwen3.6-27b"))
    assert (facts.num_layers, facts.hidden_size, facts.vocab_size) == (64, 5120, 248_320)
    assert facts.layer_types.count("linear_attention") == 48
    assert facts.layer_types[3] == "full_attention"
    assert facts.reserved_token_ids == (248070,)
    assert facts.rope_theta == 1e7
    assert facts.rope_scaling == {}
