"""YAML with line numbers: every value remembers where it stood, and a reader that misses nothing.

``parse`` gives a tree of :class:`Located`; :class:`Fields` takes keys out of a mapping one by one and reports what
was missing, of the wrong kind, or left over. Problems are collected, not raised, so that one pass names them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megamoe_cli.errors import UsageError
from megamoe_cli.settings import nearest

ERROR, WARNING = "error", "warning"


@dataclass(frozen=True, order=True)
class Problem:
    """One finding in a file. ``line`` counts from 1; ``rule`` is its stable name."""

    line: int
    rule: str
    message: str
    severity: str = ERROR

    def text(self, path: Path | str) -> str:
        return f"{path}:{self.line}: {self.severity}: {self.rule}: {self.message}"


@dataclass(frozen=True)
class Located:
    """``value``: a scalar, a list of Located, or a dict of str to Located. ``keys``: lines of a mapping's keys."""

    value: Any
    line: int
    keys: dict[str, int] | None = None

    def plain(self) -> Any:
        """The same without lines."""
        if isinstance(self.value, dict):
            return {key: item.plain() for key, item in self.value.items()}
        if isinstance(self.value, list):
            return [item.plain() for item in self.value]
        return self.value


def read(path: Path) -> str:
    """The file's text. UsageError (exit 2) when it cannot be read as UTF-8."""
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}", rule="unreadable") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}", rule="unreadable") from None


def parse(text: str, path: Path | str, problems: list[Problem]) -> Located:
    """The tree of one YAML document. Repeated keys become problems; text that is no YAML is a UsageError (exit 2)."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(text)  # the C one is ten times faster, where it was built
    try:
        node = loader.get_single_node()
        if node is None:
            raise UsageError(f"{path} is empty", rule="unreadable")
        return _located(loader, node, problems, ())
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        where = f":{mark.line + 1}" if mark else ""
        said = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise UsageError(f"{path}{where}: this is not readable YAML: {said}", rule="unreadable") from None
    except RecursionError:
        raise UsageError(f"{path}: the YAML nests too deeply", rule="unreadable") from None
    finally:
        loader.dispose()


def _located(loader: Any, node: Any, problems: list[Problem], above: tuple[int, ...]) -> Located:
    import yaml

    line = node.start_mark.line + 1
    if id(node) in above:
        raise yaml.MarkedYAMLError(problem="an alias contains itself", problem_mark=node.start_mark)
    above = (*above, id(node))
    if isinstance(node, yaml.MappingNode):
        values: dict[str, Located] = {}
        keys: dict[str, int] = {}
        for key_node, value_node in node.value:
            key = loader.construct_object(key_node, deep=True) if isinstance(key_node, yaml.ScalarNode) else "?"
            key, at = str(key), key_node.start_mark.line + 1
            if key in values:
                problems.append(Problem(at, "duplicate-key", f"{key!r} is given a second time (first in line {keys[key]})"))
                continue
            keys[key], values[key] = at, _located(loader, value_node, problems, above)
        return Located(values, line, keys)
    if isinstance(node, yaml.SequenceNode):
        return Located([_located(loader, item, problems, above) for item in node.value], line)
    return Located(loader.construct_object(node, deep=True), line)


class Fields:
    """Reads a mapping strictly. ``what`` names it in messages. Use as a context manager: leftovers are reported."""

    def __init__(self, node: Located, what: str, problems: list[Problem]) -> None:
        self.what, self.problems, self.line = what, problems, node.line
        self.values: dict[str, Located] = {}
        self.keys: dict[str, int] = node.keys or {}
        self._seen: list[str] = []
        if isinstance(node.value, dict):
            self.values = dict(node.value)
        else:
            self.bad(node.line, "wrong-type", f"{what} must be a mapping, not {_kind(node.value)}")

    def __enter__(self) -> Fields:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            for key in self.values:
                if key not in self._seen:
                    self.bad(self.keys[key], "unknown-key", f"{self.what} has no key {key!r}{nearest(key, self._seen)}")

    def bad(self, line: int, rule: str, message: str) -> None:
        self.problems.append(Problem(line, rule, message))

    def line_of(self, key: str) -> int:
        """Where ``key`` stands, or the mapping itself when it is missing."""
        return self.keys.get(key, self.line)

    def node(self, key: str, required: bool = True) -> Located | None:
        """The raw value, marked as known."""
        self._seen.append(key)
        if key not in self.values and required:
            self.bad(self.line, "missing-key", f"{self.what} lacks {key!r}")
        return self.values.get(key)

    def take(self, key: str, read_value: Callable[[Any], Any], wanted: str, default: Any = None, required: bool = True) -> Any:
        """``read_value`` of the plain value; ValueError or TypeError of it becomes a problem that says ``wanted``."""
        node = self.node(key, required)
        if node is None:
            return default
        try:
            return read_value(node.plain())
        except (ValueError, TypeError) as error:
            detail = f" ({error})" if str(error) else ""
            self.bad(self.keys[key], "wrong-type", f"{self.what}: {key} must be {wanted}, not {_kind(node.value)}{detail}")
            return default

    def text(self, key: str, default: str = "", required: bool = True, choices: tuple[str, ...] = ()) -> str:
        value = self.take(key, _text, "text", default, required)
        if choices and key in self.values and isinstance(self.values[key].value, str) and value not in choices:
            self.bad(self.keys[key], "bad-value", f"{self.what}: {key}={value!r} is not one of {', '.join(choices)}{nearest(value, choices)}")
            return default
        return value

    def integer(self, key: str, default: int | None = None, required: bool = True, low: int | None = None) -> int | None:
        value = self.take(key, _integer, "an integer", default, required)
        if low is not None and value is not None and value < low:
            self.bad(self.line_of(key), "bad-value", f"{self.what}: {key}={value} is below {low}")
        return value

    def number(self, key: str, default: float | None = None, required: bool = True) -> float | None:
        return self.take(key, _number, "a number", default, required)

    def flag(self, key: str, default: bool = False, required: bool = True) -> bool:
        return self.take(key, _flag, "true or false", default, required)

    def mappings(self, key: str, required: bool = True) -> Iterator[tuple[str, int, Located]]:
        """(name, line of the name, value) of a mapping of mappings."""
        node = self.node(key, required)
        if node is None:
            return
        if not isinstance(node.value, dict):
            self.bad(node.line, "wrong-type", f"{self.what}: {key} must be a mapping, not {_kind(node.value)}")
            return
        for name, item in node.value.items():
            yield name, (node.keys or {})[name], item

    def items(self, key: str, required: bool = True) -> list[Located]:
        """The entries of a list."""
        node = self.node(key, required)
        if node is None:
            return []
        if not isinstance(node.value, list):
            self.bad(node.line, "wrong-type", f"{self.what}: {key} must be a list, not {_kind(node.value)}")
            return []
        return node.value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _integer(value: Any) -> int:
    if type(value) is not int:
        raise TypeError
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError
    if value != value:
        raise ValueError("nan is no number")
    return float(value)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _kind(value: Any) -> str:
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    return "nothing" if value is None else repr(value)
