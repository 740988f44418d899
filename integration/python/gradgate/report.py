"""A decision log (JSON lines, docs/gate.md) as one self-contained page."""

import json
import os
import pathlib

from ._native import Error

PLACE = "GRADGATE_RECORDS"


def read_log(path: str | os.PathLike) -> list[dict]:
    """The records of a log. Error names the first line that is not one."""
    try:
        lines = pathlib.Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise Error(12, f"gradgate report: cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise Error(1, f"gradgate report: {path} is not UTF-8: {error}") from None
    records = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise Error(1, f"gradgate report: {path} line {number}: not JSON: {error}") from None
        if not isinstance(record, dict) or record.get("v") != 1 or "event" not in record:
            raise Error(1, f"gradgate report: {path} line {number}: not a record of a decision log (v 1, event)")
        records.append(record)
    if not records:
        raise Error(1, f"gradgate report: {path} holds no records")
    return records


def render(records: list[dict]) -> str:
    """The page."""
    template = pathlib.Path(__file__).with_name("report.html").read_text(encoding="utf-8")
    # "<" never appears as itself: no record can end the script element that holds it.
    return template.replace(PLACE, json.dumps(records, allow_nan=False).replace("<", "\\u003c"), 1)


def write(log: str | os.PathLike, output: str | os.PathLike) -> int:
    """Reads ``log``, writes ``output`` (whole or not at all); the number of records."""
    records = read_log(log)
    page = render(records)
    target = pathlib.Path(output)
    draft = target.with_name(f"{target.name}.{os.getpid()}")
    try:
        draft.write_text(page, encoding="utf-8")
        draft.replace(target)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise Error(12, f"gradgate report: cannot write {output}: {error.strerror or error}") from None
    return len(records)
