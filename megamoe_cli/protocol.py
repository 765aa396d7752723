"""What the supervisor and its workers say to each other: JSON lines and the result record.

Worker -> supervisor, one object per line on the worker's real stdout:

* ``{"hello": {...}}`` once, when it can take cases;
* ``{"stage": "compile", "id": ...}`` when a case enters a stage (``compile`` has a time limit of its own);
* ``{"fatal": {"message", "hint", "exit_code"}}`` when no case can run here (no GPU, too many ranks);
* a case result: ``{"id", "status", ...}``, the fields of :class:`CaseResult`.

Supervisor -> worker: one case object per line; end of file means finish. Imports neither torch nor cupy.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Mapping

STATUSES = ("pass", "fail", "fault", "error", "hang", "crash")
MAX_LINE = 64 << 20  # bytes; a longer line is a broken worker, not a result


@dataclass
class CaseResult:
    """Outcome of one case. ``seconds`` is wall time of the case, ``stages`` the same split by stage."""

    id: str
    status: str
    where: str = ""
    seconds: float = 0.0
    message: str = ""  # one line: why it is not a pass
    findings: list[dict] = field(default_factory=list)  # the first ten
    findings_total: int = 0
    metrics: dict[str, Any] = field(default_factory=dict)
    fault: dict | None = None  # {"text": ..., "records": {rank: {...}}}
    kernel: dict[str, Any] = field(default_factory=dict)  # name, digest, phase, config
    stages: dict[str, float] = field(default_factory=dict)
    stderr: list[str] = field(default_factory=list)  # last lines, for crash, hang and error
    repro: str = ""
    smallest: str = ""  # the command of a smaller case that fails in the same way
    exit_code: int = 0  # what this result alone would make the command return
    respawn: bool = False  # the worker's device context is gone; it will exit

    @property
    def passed(self) -> bool:
        return self.status == "pass"

    def to_dict(self) -> dict[str, Any]:
        return plain(asdict(self))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "CaseResult":
        """Raises ValueError when ``data`` is no result (missing id, unknown status)."""
        if not isinstance(data.get("id"), str) or data.get("status") not in STATUSES:
            raise ValueError("not a case result")
        known = {f.name for f in fields(cls)}
        return cls(**{k: v for k, v in data.items() if k in known})


def case_dict(case: Any) -> dict[str, Any]:
    """A case as the JSON object of the protocol; takes a mapping or anything with ``to_dict()``."""
    return dict(case) if isinstance(case, Mapping) else dict(case.to_dict())


def plain(value: Any) -> Any:
    """``value`` as JSON can hold it: non-finite floats become the strings nan, inf, -inf."""
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if hasattr(value, "item"):  # numpy and torch scalars
        return plain(value.item())
    return str(value)


def encode(message: Mapping[str, Any]) -> bytes:
    return (json.dumps(plain(message), separators=(",", ":"), allow_nan=False) + "\n").encode()


def decode(line: bytes) -> dict[str, Any] | None:
    """The object on ``line``, or None when it is not a JSON object (a stray print)."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
