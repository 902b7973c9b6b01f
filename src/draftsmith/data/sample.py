"""A first look at data: lengths of documents and how much of them is learnt, from the first rows of each source."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from draftsmith.data.convert import RowConverter
from draftsmith.data.sources import parse_sources, read_source
from draftsmith.data.tokenize import TokenizeConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SAMPLE_ROWS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Documents of some rows, in numbers."""

    lengths: tuple[int, ...]
    num_supervised: int
    """Tokens of them that are learnt."""


def sample_rows(
    spec: str, tokenizer: PreTrainedTokenizerBase, options: TokenizeConfig, rows: int = SAMPLE_ROWS
) -> Sample:
    """The first rows of every source, `rows` of all together, as they would be prepared; unusable ones count nothing.

    Args:
        spec: sources, separated by commas as `--data` takes them.

    Raises:
        DataError: a source that isn't there. TargetError: no chat template.
    """
    sources = parse_sources([part.strip() for part in spec.split(",") if part.strip()])
    converter = RowConverter(tokenizer, options, "keep")
    each = max(1, rows // len(sources))
    documents = [
        document
        for source in sources
        for raw in islice(read_source(source), each)
        for document in converter.convert(raw).packed
    ]
    return Sample(
        lengths=tuple(len(document.ids) for document in documents),
        num_supervised=sum(int(document.mask.sum()) for document in documents),
    )
