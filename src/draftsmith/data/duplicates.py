"""Duplicate conversations: exact ones by a hash of their text, near ones by MinHash over word triples."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from draftsmith.data.conversations import Conversation, Skip

Duplicates = Literal["keep", "drop-exact", "drop-near"]
NUM_BANDS, BAND_ROWS = 6, 8
"""Bands of MinHash values; one equal band makes two texts near: 97% of pairs whose triples are 0.9 alike, 2% at 0.5."""
_GENERATOR = np.random.Generator(np.random.PCG64(0))
MULTIPLIERS = _GENERATOR.integers(0, 2**63, NUM_BANDS * BAND_ROWS, dtype=np.uint64) * 2 + 1
ADDENDS = _GENERATOR.integers(0, 2**63, NUM_BANDS * BAND_ROWS, dtype=np.uint64)
WORD = re.compile(r"[\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff]|[^\W\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff]+")
"""A word; in scripts that put no spaces between words (Chinese, Japanese, Thai, Lao), a character."""
MIN_WORDS = 12
"""Shorter texts have too few word triples for a near match to mean anything: only exact ones count."""


@dataclass(frozen=True, slots=True)
class Signature:
    """16 bytes for exact matches, one 64-bit key a band for near ones (none where not asked for, or too short)."""

    exact: bytes
    near: tuple[int, ...]


def signature_of(conversation: Conversation, mode: Duplicates) -> Signature | None:
    """What identifies the conversation, None where duplicates are kept."""
    if mode == "keep":
        return None
    if conversation.token_ids is not None:
        text = words = " ".join(map(str, conversation.token_ids))
    elif conversation.text is not None:
        text = words = conversation.text + "\0" + (conversation.completion or "")
    else:
        text = json.dumps([conversation.messages, conversation.tools], sort_keys=True, default=str)
        # A long system prompt that rows share makes none of them alike.
        said = (message for message in conversation.messages if message["role"] not in ("system", "developer"))
        words = "\n".join(str(message["content"]) for message in said)
    exact = hashlib.blake2b(text.encode(), digest_size=16).digest()
    return Signature(exact, _band_keys(words) if mode == "drop-near" else ())


def _band_keys(text: str) -> tuple[int, ...]:
    words = WORD.findall(text.lower())
    if len(words) < MIN_WORDS:
        return ()
    triples = {" ".join(words[place : place + 3]) for place in range(len(words) - 2)}
    digests = b"".join(hashlib.blake2b(triple.encode(), digest_size=8).digest() for triple in sorted(triples))
    hashes = np.frombuffer(digests, dtype=np.uint64)
    least = (hashes[:, None] * MULTIPLIERS + ADDENDS).min(axis=0)  # wraps modulo 2**64: a family of hash functions
    return tuple(
        int.from_bytes(hashlib.blake2b(band.tobytes(), digest_size=8, salt=bytes([index])).digest(), "big")
        for index, band in enumerate(least.reshape(NUM_BANDS, BAND_ROWS))
    )


@dataclass(slots=True)
class SeenRows:
    """Signatures of the rows so far: about 100 bytes a row, 500 with near ones."""

    exact: set[bytes] = field(default_factory=set[bytes])
    near: set[int] = field(default_factory=set[int])

    def check(self, signature: Signature) -> Skip | None:
        """Why the row is a duplicate of an earlier one; None, and remembered, if it is not."""
        if signature.exact in self.exact:
            return Skip("duplicate of an earlier row")
        if not self.near.isdisjoint(signature.near):
            return Skip("near duplicate of an earlier row")
        self.exact.add(signature.exact)
        self.near.update(signature.near)
        return None
