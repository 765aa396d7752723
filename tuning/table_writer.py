"""A table as YAML (one row a line, so that a diff reads), as JSON, and as a constexpr C++ header for a runtime that has
no YAML. Files are written atomically: a reader sees the old table or the new one."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megamoe_cli.errors import UsageError
from megamoe_cli.tuning.schema import KERNEL, SCHEMA, Choice, Evidence, Range, Span, Table

EXPORT_SCHEMA = "megamoe.table-export/1"


def to_dict(table: Table) -> dict[str, Any]:
    """Plain data in the order of the file; what ``table_reader.decode`` reads back to an equal table."""
    out: dict[str, Any] = {"schema": SCHEMA}
    if table.title:
        out["title"] = table.title
    out["kernel"] = {"name": KERNEL} | ({"source_digest": table.digest} if table.digest else {})
    out["match"] = {key: _match_value(value) for key, value in table.match.values.items()}
    out["axis"] = table.axis
    out["default"] = table.default
    out["ranges"] = [_range(entry) for entry in table.ranges]
    out["configs"] = {name: choice.to_dict() for name, choice in table.configs.items()}
    if table.policies:
        out["policies"] = {name: {"enabled": p.enabled} | ({"reason": p.reason} if p.reason else {}) for name, p in table.policies.items()}
    if table.evidence:
        out["evidence"] = [_evidence(row) for row in table.evidence]
    if table.validation is not None:
        out["validation"] = {key: value for key, value in table.validation.items() if value is not None and value != []}
    out["provenance"] = dict(table.provenance)
    if table.notes:
        out["notes"] = list(table.notes)
    return out


def _match_value(value: int | str | Span) -> Any:
    if isinstance(value, Span):
        return {"from": value.low, "to": value.high if math.isinf(value.high) else int(value.high)}
    return value


def _range(entry: Range) -> dict[str, Any]:
    otherwise = entry.use if entry.wanted else entry.otherwise
    return ({"from": _number(entry.start), "to": _number(entry.end), "use": entry.wanted or entry.use, "evidence": list(entry.evidence)}
            | ({"otherwise": otherwise} if otherwise else {})
            | ({"note": entry.note} if entry.note else {}))


def _evidence(row: Evidence) -> dict[str, Any]:
    values = {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(row).items() if key != "line"}
    return {key: value for key, value in values.items() if value not in (None, "", 0) or key == "tokens"}


def _number(value: float) -> float | int:
    return int(value) if math.isfinite(value) and value == int(value) else value


def to_yaml(table: Table, comment: str = "") -> str:
    """The file's text. ``comment``: lines put above it."""
    parts = [f"# {line}".rstrip() for line in comment.splitlines()]
    for key, value in to_dict(table).items():
        parts += _lines(key, value)
    return "\n".join(parts) + "\n"


def _lines(key: str, value: Any, indent: str = "") -> list[str]:
    """A mapping or a list of mappings has one line for each entry; everything below is on that line."""
    if isinstance(value, dict) and value:
        return [f"{indent}{key}:"] + [line for name, item in value.items()
                                      for line in (_lines(name, item, indent + "  ") if _is_rows(item) else [f"{indent}  {name}: {_flow(item)}"])]
    if _is_rows(value):
        return [f"{indent}{key}:"] + [f"{indent}  - {_flow(item)}" for item in value]
    return [f"{indent}{key}: {_flow(value)}"]


def _is_rows(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def _flow(value: Any) -> str:
    import yaml

    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    text = yaml.dump(value, Dumper=dumper, default_flow_style=True, sort_keys=False, width=2**31 - 1, allow_unicode=True).strip()
    return text.removesuffix("\n...")


def write(path: Path, table: Table, comment: str = "") -> None:
    """Writes the YAML atomically and durably. UsageError when the place cannot be written."""
    write_text(path, to_yaml(table, comment))


def write_text(path: Path, text: str) -> None:
    """Temporary file in the same folder, fsync, rename, fsync of the folder."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                stream.write(text)
                stream.flush()
                os.fsync(stream.fileno())
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        sync_folder(path.parent)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}", rule="unwritable") from None


def sync_folder(folder: Path) -> None:
    """Makes names in ``folder`` survive a power loss."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# -- for a runtime ---------------------------------------------------------------------------------


def to_json(table: Table) -> str:
    """Match, ranges and configurations with every field; ``to`` of the last range is null (JSON has no infinity)."""
    ranges = [{"from": r.start, "to": None if math.isinf(r.end) else r.end, "use": r.use, "measured": bool(r.evidence)} for r in table.ranges]
    return json.dumps({"schema": EXPORT_SCHEMA, "source": table.source, "digest": table.digest, "axis": table.axis,
                       "match": to_dict(table)["match"], "default": table.default, "ranges": ranges,
                       "configs": {name: choice.to_dict() | {"ctas": choice.ctas} for name, choice in picked(table).items()}}, indent=1) + "\n"


def picked(table: Table) -> dict[str, Choice]:
    """The configurations that some load gets; others are in a table for their evidence."""
    used = {table.default, *(entry.use for entry in table.ranges)}
    return {name: choice for name, choice in table.configs.items() if name in used}


def to_header(table: Table, origin: str) -> str:
    """C++14: ``megamoe_table::pick(load)`` is a constexpr function from the axis value to a Config."""
    names = list(picked(table))
    fields = [key for key in next(iter(table.configs.values())).to_dict() if key != "ctas"] + ["ctas"]
    texts = [key for key in fields if isinstance(getattr(table.configs[names[0]].config, key, 0), str)]
    rows = []
    for name in names:
        values = table.configs[name].to_dict() | {"ctas": table.configs[name].ctas}
        rows.append("    {" + ", ".join(f'"{values[key]}"' if key in texts else str(values[key]) for key in fields) + f"}},  // {name}")
    limits = [f"    {{{r.start!r}, {_cpp(r.end)}, {names.index(r.use)}}},  // {r.use}{'' if r.evidence or table.source == 'baseline' else ', not measured'}"
              for r in table.ranges]
    match = "\n".join(f"//   {key}: {_plain(value)}" for key, value in to_dict(table)["match"].items())
    return f"""\
// Generated by `megamoe table export` from {origin} ({table.source}); do not edit. It is for:
{match}
#pragma once
#include <limits>

namespace megamoe_table {{

struct Config {{
{chr(10).join(f"    {'const char*' if key in texts else 'unsigned'} {key};" for key in fields)}
}};
// [from, to) of {table.axis}
struct Range {{
    double from, to;
    unsigned config;
}};

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr Config kConfigs[] = {{
{chr(10).join(rows)}
}};
constexpr Range kRanges[] = {{
{chr(10).join(limits)}
}};
constexpr unsigned kDefault = {names.index(table.default)};

constexpr {_axis_function(table)}
// The configuration for a load; a load that no range has (NaN, negative) gets the default.
constexpr const Config& pick(double load) {{
    for (const Range& range : kRanges)
        if (range.from <= load && load < range.to) return kConfigs[range.config];
    return kConfigs[kDefault];
}}

}}  // namespace megamoe_table
"""


def _axis_function(table: Table) -> str:
    if table.axis == "tokens":
        return "double load(double tokens) { return tokens; }"
    return ("double load(double tokens, double ranks, double topk, double experts) { return tokens * ranks * topk / experts; }")


def _cpp(value: float) -> str:
    return "kInfinity" if math.isinf(value) else repr(value)


def _plain(value: Any) -> str:
    return f"{value['from']} <= n < {value['to']}" if isinstance(value, Mapping) else str(value)
