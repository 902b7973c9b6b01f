"""Token scores against the model's own logits."""

from __future__ import annotations

import pytest
import torch

from draftsmith.target import score
from draftsmith.target.score import score_documents
from tests.families import documents_of, tiny_target


@pytest.mark.parametrize("family", ["qwen3_5", "gemma2", "granite"])
def test_scores_are_those_of_the_model_itself_whatever_shares_the_batch(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(score, "CHUNK_ROWS", 7)
    target, documents = tiny_target(family), documents_of([5, 33, 1, 20])
    found = score_documents(target, documents)
    for document, (nll, entropy) in zip(documents, found, strict=True):
        with torch.no_grad():
            logits = target.model(input_ids=document.token_ids[None]).logits[0].double()
        probabilities = logits.softmax(-1)
        own = -probabilities.log()[:-1].gather(1, document.token_ids[1:, None])[:, 0]
        spread = -(probabilities * probabilities.log()).sum(-1)[:-1]
        torch.testing.assert_close(nll[1:].double(), own, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(entropy[1:].double(), spread, rtol=1e-4, atol=1e-4)
        assert nll[0] == entropy[0] == 0
