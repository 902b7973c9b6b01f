from __future__ import annotations

import io
from collections.abc import Sequence

import pytest
import torch
from rich.console import Console

from draftsmith.data.onpolicy import (
    HISTOGRAM_EDGES,
    OnPolicyConfig,
    TokenScores,
    check_on_policy,
    histogram,
    sample_indices,
)
from draftsmith.errors import ConfigError, DataError
from draftsmith.records import Document

VOCABULARY, LENGTH = 50, 40


def sampled_rows(temperature: float | None, num_rows: int = 40) -> tuple[list[Document], torch.Tensor]:
    """Rows drawn from one known distribution per place at this temperature; None: uniformly."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(LENGTH, VOCABULARY, generator=generator) * 2
    sampling = torch.zeros_like(logits) if temperature is None else logits / temperature
    ids = torch.multinomial(sampling.softmax(-1), num_rows, replacement=True, generator=generator).T
    mask = torch.arange(LENGTH) >= 10
    return [Document(token_ids=row, loss_mask=mask.clone()) for row in ids], logits


def scorer(logits: torch.Tensor):
    logp = logits.log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)

    def score(documents: Sequence[Document]) -> list[TokenScores]:
        return [TokenScores(-logp.gather(-1, d.token_ids[:, None])[:, 0], entropy) for d in documents]

    return score


@pytest.mark.parametrize(
    ("temperature", "low", "high", "verdict"),
    [
        (1.0, -0.1, 0.1, "sampled at about temperature 1"),
        (0.5, -2.0, -0.2, "sampled colder"),
        (None, 0.5, 5.0, "aren't the target's own"),
    ],
)
def test_the_gap_tells_own_colder_and_foreign_text(
    temperature: float | None, low: float, high: float, verdict: str
) -> None:
    rows, logits = sampled_rows(temperature)
    report = check_on_policy(rows, scorer(logits), OnPolicyConfig())
    assert low < report.mean < high
    assert verdict in report.verdict
    assert report.is_foreign == (temperature is None)
    assert ("draftsmith regenerate" in report.verdict) == (temperature is None)
    assert report.num_tokens == 40 * 30
    kept = report.to_dict()
    assert kept["verdict"] == report.verdict
    assert kept["num_rows"] == len(kept["gaps"]) == 40
    assert sum(kept["gaps"]) / 40 == pytest.approx(kept["mean"], abs=1e-3)
    assert kept["is_foreign"] == (temperature is None)
    screen = io.StringIO()
    report.print(Console(file=screen, width=200))
    assert "█" in screen.getvalue()


def test_only_supervised_tokens_with_one_before_them_count() -> None:
    document = Document(token_ids=torch.tensor([1, 2, 3]), loss_mask=torch.tensor([True, False, True]))
    scores = TokenScores(torch.tensor([float("nan"), 9.0, 2.0]), torch.tensor([0.0, 0.0, 1.5]))
    report = check_on_policy([document], lambda documents: [scores], OnPolicyConfig())
    assert report.gaps == (0.5,)
    assert report.num_tokens == 1


def test_a_mixture_says_so() -> None:
    own, logits = sampled_rows(1.0)
    foreign, _ = sampled_rows(None)
    report = check_on_policy(own[:38] + foreign[:2], scorer(logits), OnPolicyConfig())
    assert "mixture" in report.verdict
    assert 0.05 < report.share_foreign < 0.3


def test_rows_are_counted_and_sampled_evenly() -> None:
    rows, logits = sampled_rows(1.0)
    told: list[int] = []
    report = check_on_policy(rows[:10], scorer(logits), OnPolicyConfig(off_policy_batch=4), told.append)
    assert told == [4, 4, 2]
    assert len(report.gaps) == 10
    assert sample_indices(10, 4) == [0, 2, 5, 7]
    assert sample_indices(3, 200) == [0, 1, 2]


def test_the_histogram_counts_every_row() -> None:
    counts = histogram([-9.0, -1.0, 0.1, 99.0])
    assert sum(counts) == 4
    assert counts[0] == counts[1] == counts[-1] == 1
    assert len(counts) == len(HISTOGRAM_EDGES) + 1


def test_scores_that_cannot_be_are_refused() -> None:
    rows, logits = sampled_rows(1.0, 2)
    short = TokenScores(torch.zeros(3), torch.zeros(3))
    with pytest.raises(DataError, match="one a token"):
        check_on_policy(rows[:1], lambda documents: [short], OnPolicyConfig())
    broken = TokenScores(torch.full((LENGTH,), float("nan")), torch.zeros(LENGTH))
    with pytest.raises(DataError, match="isn't finite"):
        check_on_policy(rows[:1], lambda documents: [broken], OnPolicyConfig())
    with pytest.raises(DataError, match="--off-policy-rows 0"):
        check_on_policy([], scorer(logits), OnPolicyConfig())
    for bad in ({"off_policy_rows": -1}, {"off_policy_batch": 0}):
        with pytest.raises(ConfigError, match="--off-policy"):
            OnPolicyConfig(**bad)
