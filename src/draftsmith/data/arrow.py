"""pyarrow, which has no types: its names as used here, each with the type we rely on."""

from __future__ import annotations

from typing import Any, TypeAlias

import pyarrow
import pyarrow.parquet

pa: Any = pyarrow
parquet: Any = pyarrow.parquet
RecordBatch: TypeAlias = Any
ArrowError: type[Exception] = pa.ArrowException
