from __future__ import annotations

import pytest

from draftsmith.data.arrow import ArrowError, pa, parquet


def test_errors_of_pyarrow_are_arrow_errors(tmp_path) -> None:
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(ArrowError):
        parquet.ParquetFile(tmp_path / "bad.parquet")
    with pytest.raises(ArrowError):
        pa.ipc.open_stream(b"no stream").read_all()
