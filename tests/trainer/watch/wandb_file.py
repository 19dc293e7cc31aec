"""Reads wandb's offline file: the LevelDB log format behind a header of 7 bytes, each record a protobuf ``Record``.

wandb 0.31 reads it in Go only, so tests need their own reader.
Format: https://github.com/google/leveldb/blob/main/doc/log_format.md
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

_BLOCK = 32768
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def read_records(path: Path) -> list[Any]:
    """All records of a ``.wandb`` file in order. Raises :class:`ValueError` when it is none."""
    from wandb.proto.wandb_internal_pb2 import Record

    data = path.read_bytes()
    if data[:4] != b":W&B":
        raise ValueError(f"{path} is no wandb file")
    records, position, pending = [], 7, b""
    while position + 7 <= len(data):
        left = _BLOCK - position % _BLOCK
        if left < 7:
            position += left
            continue
        _checksum, length, kind = struct.unpack_from("<IHB", data, position)
        pending += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (_FULL, _LAST):
            record = Record()
            record.ParseFromString(pending)
            records.append(record)
            pending = b""
        elif kind not in (_FIRST, _MIDDLE):
            raise ValueError(f"{path}: unknown record type {kind} before byte {position}")
    return records


def history(records: list[Any]) -> list[dict[str, Any]]:
    """The logged rows. Keys may be nested by their path; they are joined by dots."""
    rows = []
    for record in records:
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items})
    return rows


def summary(records: list[Any]) -> dict[str, Any]:
    """The summary after all updates, by key."""
    values: dict[str, Any] = {}
    for record in records:
        if record.WhichOneof("record_type") == "summary":
            for item in record.summary.update:
                values[item.key or ".".join(item.nested_key)] = json.loads(item.value_json)
    return values
