from __future__ import annotations

import pytest

from draftsmith.data.buckets import choose_buckets, padding_waste
from draftsmith.plan.corpus import ASSUMED_FILL, ASSUMED_PADDING, assumed_corpus, corpus_of


def test_data_nobody_looked_at_are_as_assumed() -> None:
    corpus = assumed_corpus(1000, 0.25, "assumed")
    assert (corpus.tokens, corpus.supervised, corpus.source) == (1000, 250, "assumed")
    assert (corpus.padding, corpus.fill) == (ASSUMED_PADDING, ASSUMED_FILL)
    assert assumed_corpus(1, 0.1, "").supervised == 1


def test_documents_count_their_own_padding() -> None:
    lengths = [100, 100, 700, 64]
    corpus = corpus_of(lengths, 300, 2, "3 documents")
    assert (corpus.tokens, corpus.supervised) == (964, 300)
    assert corpus.padding == pytest.approx(padding_waste(lengths, choose_buckets(lengths, 2, 64)))
    assert 0 < corpus.padding < 0.2
