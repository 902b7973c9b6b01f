from __future__ import annotations

import pytest

from draftsmith.plan.calibration import CARDS, DRAFTER_SHARE, PCIE_GBPS


def test_the_h200_is_the_measured_card() -> None:
    card = CARDS[0]
    assert (card.name, card.tflops) == ("h200", 664.0)
    assert pytest.approx(0.83, abs=0.005) == DRAFTER_SHARE


def test_other_cards_are_scaled_from_their_nominal_rate() -> None:
    h100 = next(card for card in CARDS if card.name == "h100")
    assert h100.tflops == pytest.approx(664.0)  # the same chip as the H200
    assert len({card.name for card in CARDS}) == len(CARDS)


def test_peers_are_cards_with_a_link_of_their_own() -> None:
    assert [card.name for card in CARDS if card.has_peers] == ["h200", "b200", "h100", "a100", "a100-40gb"]
    assert all(card.peer_gbps >= PCIE_GBPS for card in CARDS)
