"""Reading trajectory logs: damaged, foreign and hostile files are skipped, counted, never run."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from retrieval.trajectory_log import LoggedTrajectory, codec, read_log
from retrieval.trajectory_log.codec import LogFileRejectedError, decode, encode
from retrieval.trajectory_log.schema import SCHEMA, SCHEMA_VERSION
from tests.support.log_rows import content, ids, logged
from valuspec.cost import CostStaircase

COSTS = {1: CostStaircase((1, 8), (0.02, 0.03)), 4: CostStaircase((1, 8), (0.03, 0.06))}


def save(folder: Path, name: str, blob: bytes) -> Path:
    path = folder / f"{name}.parquet"
    path.write_bytes(blob)
    return path


def foreign(table: pa.Table) -> bytes:
    """A table as pyarrow writes it by default."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    return sink.getvalue().to_pybytes()


def reason(blob: bytes) -> str:
    with pytest.raises(LogFileRejectedError) as refused:
        decode(blob)
    return refused.value.reason


# -- what was written is read


def test_rows_and_costs_come_back(tmp_path) -> None:
    rows = [logged(i, prompt_ids=np.arange(1 + i * 100, dtype=np.int32)) for i in range(5)]
    save(tmp_path, "a", encode(rows, COSTS))
    read = read_log([tmp_path])
    assert [content(row) for row in read.trajectories] == [content(row) for row in rows]
    assert read.trajectories[0].kept.dtype == np.int32
    assert read.costs == COSTS
    assert (read.files_read, read.skipped) == (1, Counter())


def test_an_answer_of_one_token_has_no_steps() -> None:
    row = logged(output_ids=ids(5), kept=ids(), accepted=ids(), batch_size=ids())
    assert content(decode(encode([row], {})).rows[0]) == content(row)


def test_the_schema_is_pinned() -> None:
    assert SCHEMA_VERSION == 1
    assert SCHEMA.names == [f.name for f in dataclasses.fields(LoggedTrajectory)]
    kinds = Counter(str(f.type) for f in SCHEMA)
    assert kinds == {"string": 7, "int64": 2, "double": 7, "list<element: int32 not null>": 5}
    assert not any(f.nullable for f in SCHEMA)


def test_order_is_by_sequence_whatever_the_files_and_clocks_say(tmp_path) -> None:
    late, early = logged(5, finished_at=1.0), logged(2, finished_at=9e9)
    save(tmp_path, "a", encode([late], {1: COSTS[1]}))
    save(tmp_path, "b", encode([early], {1: COSTS[4]}))
    read = read_log([tmp_path])
    assert [row.sequence for row in read.trajectories] == [3, 6]
    assert read.costs == {1: COSTS[1]}  # of the newest


def test_a_row_in_two_files_is_read_once(tmp_path) -> None:
    save(tmp_path, "a", encode([logged(1), logged(2)], {}))
    save(tmp_path, "b", encode([logged(2), logged(3), logged(3, writer="x")], {}))
    read = read_log([tmp_path, tmp_path / "a.parquet"])
    assert [(r.sequence, r.writer) for r in read.trajectories] == [
        (2, "w"), (3, "w"), (4, "w"), (4, "x")
    ]  # fmt: skip
    assert read.skipped == {"row.duplicate": 3}


def test_rows_and_costs_of_other_models_are_left_out(tmp_path) -> None:
    save(tmp_path, "a", encode([logged(1)], {1: COSTS[1]}))
    save(tmp_path, "b", encode([logged(2, model_fingerprint="other")], COSTS))
    read = read_log([tmp_path], model_fingerprint="model")
    assert [row.sequence for row in read.trajectories] == [2]
    assert read.costs == {1: COSTS[1]}
    assert read.skipped == {"row.other_model": 1}


# -- damage


def test_every_flipped_bit_and_every_truncation_is_noticed() -> None:
    blob = encode([logged(i) for i in range(2)], COSTS)
    for place in range(len(blob)):
        assert reason(blob[:place])
        damaged = bytearray(blob)
        damaged[place] ^= 1 << place % 8
        assert reason(bytes(damaged))


def test_readable_files_are_read_and_the_others_counted(tmp_path) -> None:
    blob = encode([logged(1)], {})
    save(tmp_path, "good", blob)
    save(tmp_path, "zero", b"")
    save(tmp_path, "text", b"not a Parquet file at all")
    save(tmp_path, "cut", blob[:-100])
    save(tmp_path, "flipped", blob[:300] + bytes([blob[300] ^ 1]) + blob[301:])
    save(tmp_path, "foreign", foreign(pa.table({"text": ["a"]})))
    (tmp_path / "folder.parquet").mkdir()
    (tmp_path / "dangling.parquet").symlink_to(tmp_path / "gone")
    (tmp_path / "secret.parquet").symlink_to("/dev/zero")
    (tmp_path / "half.parquet.tmp").write_bytes(blob[:50])
    os.mkfifo(tmp_path / "pipe.parquet")
    read = read_log([tmp_path, tmp_path / "missing.parquet"])
    assert len(read.trajectories) == read.files_read == 1
    assert read.skipped == {
        "file.empty": 1, "file.truncated": 1, "file.damaged": 1, "file.foreign": 2,
        "file.unreadable": 5,
    }  # fmt: skip


# -- hostile files, sealed like ours


def sealed(table: pa.Table, monkeypatch: pytest.MonkeyPatch, **limits: int) -> bytes:
    """A file `encode` would make if SCHEMA were the table's."""
    with monkeypatch.context() as patch:
        patch.setattr(codec, "SCHEMA", table.schema)
        rows = [dataclasses.make_dataclass("Row", row)(**row) for row in table.to_pylist()]
        return encode(rows, {})  # type: ignore[arg-type]


class Trap(pa.ExtensionType):
    """An extension type whose deserialiser runs code of the file's choosing."""

    sprung = 0

    def __init__(self) -> None:
        super().__init__(pa.int32(), "valuspec.test.trap")

    def __arrow_ext_serialize__(self) -> bytes:
        return b"anything"

    @classmethod
    def __arrow_ext_deserialize__(cls, storage_type: pa.DataType, serialized: bytes) -> Trap:
        cls.sprung += 1
        return cls()


@pytest.fixture
def trapped() -> bytes:
    pa.register_extension_type(Trap())
    column = pa.ExtensionArray.from_storage(Trap(), pa.array([1], pa.int32()))
    yield foreign(pa.table({"prompt_ids": column}))
    pa.unregister_extension_type("valuspec.test.trap")


def test_extension_types_are_refused_before_arrow_sees_the_file(trapped, tmp_path) -> None:
    pq.read_metadata(save(tmp_path, "trap", trapped))
    assert Trap.sprung > 0, "the trap works"
    Trap.sprung = 0
    assert read_log([tmp_path]).skipped == {"file.foreign": 1}
    assert Trap.sprung == 0


def test_a_seal_does_not_let_a_schema_of_arrows_own_through(trapped) -> None:
    assert reason(trapped[:-8] + codec._SEAL + b"0" * 32 + trapped[-8:]) == "foreign"


@pytest.mark.parametrize("change", ["missing", "extra", "renamed", "other type", "nullable"])
def test_other_columns_are_refused(change, monkeypatch) -> None:
    table = pa.table({n: [content(logged(1))[n]] for n in SCHEMA.names}, schema=SCHEMA)
    place = SCHEMA.get_field_index("max_tokens")
    changed = {
        "missing": table.drop_columns(["max_tokens"]),
        "extra": table.append_column(pa.field("more", pa.int64(), nullable=False), [[1]]),
        "renamed": table.rename_columns({"max_tokens": "most_tokens"}),
        "other type": table.cast(
            SCHEMA.set(place, pa.field("max_tokens", pa.float64(), nullable=False))
        ),
        "nullable": table.cast(SCHEMA.set(place, pa.field("max_tokens", pa.int64()))),
    }[change]
    decode(sealed(table, monkeypatch))
    assert reason(sealed(changed, monkeypatch)) == "foreign"


def test_another_schema_version_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(codec, "SCHEMA_VERSION", 2)
    blob = encode([logged()], {})
    monkeypatch.undo()
    assert reason(blob) == "foreign"


def test_giant_files_are_refused_from_size_and_footer(tmp_path, monkeypatch) -> None:
    with save(tmp_path, "sparse", b"PAR1").open("r+b") as file:
        file.truncate(2**40)  # takes no room on the disk
    assert read_log([tmp_path]).skipped == {"file.too_large": 1}
    bombs = {
        "rows": encode([logged(i) for i in range(20)], {}),
        "values": encode([logged(output_ids=np.zeros(2**20, np.int32), max_tokens=2**20)], {}),
        "bytes": encode([logged(request_id="x" * 2**20)], {}),
    }
    monkeypatch.setattr(pq.ParquetFile, "read", lambda self: pytest.fail("data was read"))
    monkeypatch.setattr(codec, "MAX_ROWS", 19)
    monkeypatch.setattr(codec, "MAX_VALUES", 2**20 - 1)
    monkeypatch.setattr(codec, "MAX_UNPACKED_BYTES", 2**20)
    for name, blob in bombs.items():
        assert len(blob) < 2**13
        with pytest.raises(LogFileRejectedError, match=f"too_large: [0-9]+ {name}"):
            decode(blob)


BROKEN = {
    "finish_reason": {"finish_reason": "error"},
    "text too long": {"request_id": "x" * 257},
    "times": {"forward_s": float("nan")},
    "empty prompt": {"prompt_ids": ids()},
    "output length": {"max_tokens": 4},
    "negative token id": {"output_ids": ids(7, 8, -9, 10, 11)},
    "number of steps": {"kept": ids(4)},
    "batch_size": {"batch_size": ids(1, 0)},
    "accepted": {"accepted": ids(3, -1)},
    "more accepted than kept": {"accepted": ids(1, 1)},
    "steps do not add up to the output": {"output_ids": ids(7, 8, 9)},
}


@pytest.mark.parametrize("rule", BROKEN)
def test_rows_that_cannot_be_are_left_out_and_counted(rule, tmp_path) -> None:
    rows = [logged(0), logged(1, **BROKEN[rule]), logged(2)]
    save(tmp_path, "a", encode(rows, {}))
    read = read_log([tmp_path])
    assert [row.sequence for row in read.trajectories] == [1, 3]
    assert read.skipped == {f"row.{rule}": 1}


def test_costs_that_cannot_be_make_the_file_damaged() -> None:
    class Negative(CostStaircase):
        def to_json(self) -> dict[str, list[float]]:
            return {"rows": [1, 2], "seconds": [-1.0, 2.0]}

    assert reason(encode([logged()], {1: Negative((1, 2), (1.0, 2.0))})) == "damaged"
