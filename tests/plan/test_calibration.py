from __future__ import annotations

import pytest

from draftsmith.plan.calibration import CARDS, DRAFTER_SHARE, PCIE_GBPS


def test_the_h200_is_the_measured_card() -> None:
    card = CARDS[0]
    assert (card.name, card.tflops) == ("h200", 669.0)
    assert 0.9 < DRAFTER_SHARE < 1


def test_other_cards_are_scaled_from_their_nominal_rate() -> None:
    h100 = next(card for card in CARDS if card.name == "h100")
    assert h100.tflops == pytest.approx(669.0)  # the same chip as the H200
    assert len({card.name for card in CARDS}) == len(CARDS)


def test_peers_are_cards_with_a_link_of_their_own() -> None:
    assert [card.name for card in CARDS if card.has_peers] == ["h200", "b200", "h100", "a100", "a100-40gb"]
    assert all(card.peer_gbps >= PCIE_GBPS for card in CARDS)


def test_8_bit_products_need_ada_or_newer() -> None:
    assert [card.name for card in CARDS if not card.fp8] == ["a100", "a100-40gb", "rtx3090"]
