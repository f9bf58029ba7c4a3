"""Rows of a trajectory log as the bytes of one Parquet file, sealed by a digest of them.

The digest stands in the file's own metadata and is checked before anything is parsed, so no
parser ever sees damage. It is no protection against forgery: whoever may write to the folder can
seal what they like. So what was parsed is checked as well.

Arrow's own schema is not stored. Opening a file that has one runs the deserialisers of whatever
extension types this process has registered; our columns need none, and such files are refused
after a look at the footer's bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from retrieval.trajectory_log.schema import SCHEMA, SCHEMA_VERSION, LoggedTrajectory
from valuspec.cost import CostStaircase
from valuspec.errors import ValuSpecError

MAX_FILE_BYTES = 64 * 2**20
MAX_ROWS = 2**16
MAX_VALUES = 2**26
"""Most entries of one column, over all rows."""
MAX_UNPACKED_BYTES = 2**28

Costs = Mapping[int, CostStaircase]
"""Verify cost by the largest batch size it stands for."""
RejectReason = Literal["unreadable", "empty", "too_large", "truncated", "foreign", "damaged"]

_MAGIC = b"PAR1"
_TAIL = 8  # length of the footer, 4 bytes, and the magic
_SEAL = b"valuspec.seal="
_DIGEST = 32  # hex digits


class LogFileRejectedError(ValuSpecError):
    """A log file is skipped; `reason` is one of RejectReason, for counters."""

    def __init__(self, reason: RejectReason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason: RejectReason = reason


class LogFile(NamedTuple):
    """Content of one file; `invalid` counts the rows left out, by the rule they break."""

    rows: list[LoggedTrajectory]
    costs: dict[int, CostStaircase]
    invalid: Counter[str]


def encode(rows: Sequence[LoggedTrajectory], costs: Costs) -> bytes:
    """The bytes of a file; `costs` is what the writer knows of its machine, or empty."""
    columns = {name: [getattr(row, name) for row in rows] for name in SCHEMA.names}
    metadata = {
        "valuspec.schema": str(SCHEMA_VERSION),
        "valuspec.costs": json.dumps({str(size): cost.to_json() for size, cost in costs.items()}),
        "valuspec.seal": _SEAL.decode() + "0" * _DIGEST,
    }
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(
        sink,
        SCHEMA,
        compression="zstd",
        store_schema=False,
        write_statistics=False,  # would put texts that clients choose into the footer
    ) as writer:
        writer.write_table(pa.table(columns, schema=SCHEMA))
        writer.add_key_value_metadata(metadata)
    blob = bytearray(sink.getvalue().to_pybytes())
    place = _seal_place(blob)
    blob[place : place + _DIGEST] = _digest(blob)
    return bytes(blob)


def decode(blob: bytes) -> LogFile:
    """Content of a file made by `encode`. Raises LogFileRejectedError."""
    if not blob:
        raise LogFileRejectedError("empty", "no bytes")
    if len(blob) > MAX_FILE_BYTES:
        raise LogFileRejectedError("too_large", f"more than {MAX_FILE_BYTES} bytes")
    if not blob.startswith(_MAGIC):
        raise LogFileRejectedError("foreign", "not a Parquet file")
    if len(blob) < len(_MAGIC) + _TAIL or not blob.endswith(_MAGIC):
        raise LogFileRejectedError("truncated", "no footer")
    _check_seal(blob)
    try:
        return _parse(blob)
    except (pa.ArrowException, OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise LogFileRejectedError("damaged", f"{type(error).__name__}: {error}") from error


def _parse(blob: bytes) -> LogFile:
    file = pq.ParquetFile(pa.BufferReader(blob))
    metadata = file.metadata.metadata or {}
    version = metadata.get(b"valuspec.schema", b"").decode()
    if version != str(SCHEMA_VERSION) or not file.schema_arrow.equals(SCHEMA):
        raise LogFileRejectedError("foreign", f"schema {version!r}, expected {SCHEMA_VERSION}")
    _check_size(file.metadata)
    table = file.read()
    table.validate(full=True)
    columns = [
        column.to_numpy() if pa.types.is_list(column.type) else column.to_pylist()
        for column in table.columns
    ]
    rows: list[LoggedTrajectory] = []
    invalid: Counter[str] = Counter()
    for values in zip(*columns, strict=True):
        row = LoggedTrajectory(**dict(zip(SCHEMA.names, values, strict=True)))
        try:
            rows.append(row.validate())
        except ValueError as error:
            invalid[str(error)] += 1
    costs = json.loads(metadata.get(b"valuspec.costs", b"{}"))
    return LogFile(
        rows, {int(size): CostStaircase.from_json(cost) for size, cost in costs.items()}, invalid
    )


def _check_size(metadata: pq.FileMetaData) -> None:
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    columns = range(metadata.num_columns)
    sizes = [
        ("rows", metadata.num_rows, MAX_ROWS),
        ("values", max(sum(g.column(i).num_values for g in groups) for i in columns), MAX_VALUES),
        ("bytes", sum(group.total_byte_size for group in groups), MAX_UNPACKED_BYTES),
    ]
    for name, size, limit in sizes:
        if size > limit:
            raise LogFileRejectedError("too_large", f"{size} {name}, at most {limit}")


def _check_seal(blob: bytes) -> None:
    place = _seal_place(blob)
    if place < 0:
        raise LogFileRejectedError("foreign", "not sealed, or with a schema of Arrow's own")
    blank = bytearray(blob)
    blank[place : place + _DIGEST] = b"0" * _DIGEST
    if _digest(blank) != blob[place : place + _DIGEST]:
        raise LogFileRejectedError("damaged", "content does not match its seal")


def _seal_place(blob: bytes | bytearray) -> int:
    """Where the digest stands in the footer; negative in a file that `encode` did not make."""
    length = int.from_bytes(blob[-_TAIL : -len(_MAGIC)], "little")
    start = max(len(blob) - _TAIL - length, 0)
    if b"ARROW:schema" in blob[start:]:
        return -1
    found = blob.rfind(_SEAL, start)
    return found + len(_SEAL) if found >= 0 else -1


def _digest(blob: bytes | bytearray) -> bytes:
    return hashlib.blake2b(blob, digest_size=_DIGEST // 2).hexdigest().encode()
