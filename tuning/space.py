"""The candidates of a tuning run: a declared space, expanded, pruned by the one predicate, and accounted for.

Every combination that was generated is afterwards in exactly one place: a candidate, refused by a named rule, or the same
kernel as another one. ``Expansion.accounts`` says so in numbers.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from megamoe_cli import paths
from megamoe_cli.config import KernelConfig, check, resolve
from megamoe_cli.errors import UsageError
from megamoe_cli.settings import nearest
from megamoe_cli.shapes import Shape
from megamoe_cli.tuning.schema import Choice
from megamoe_cli.tuning.yaml_source import Fields, Located, Problem, parse, read

SCHEMA = "megamoe.space/1"
MAX_COMBINATIONS = 200_000
# Axes that change what comes out, bit for bit: in every space they are searched only when asked for. None exists: the
# tolerance of the numerics contract holds for every policy and promotion, and combine sums in slot order in all of them.
NUMERICS_AXES: frozenset[str] = frozenset()
# Parameters of a launch, not of a kernel: what is legal with one legal value of them is legal with all.
LAUNCH_AXES = ("lag", "unit_blocks")
_DEFAULTS: dict[str, Any] = {f.name: f.default for f in fields(KernelConfig)} | {"ctas": 0}


@dataclass(frozen=True)
class Space:
    """One named sub-space: axis -> values."""

    name: str
    axes: Mapping[str, tuple[Any, ...]]

    @property
    def size(self) -> int:
        total = 1
        for values in self.axes.values():
            total *= len(values)
        return total

    def kernels(self) -> Iterator[Choice]:
        """Every combination of the axes that make a kernel, with the first value of each launch axis."""
        first = {axis: values[0] for axis, values in self.axes.items() if axis in LAUNCH_AXES}
        own = {axis: values for axis, values in self.axes.items() if axis not in LAUNCH_AXES}
        for values in itertools.product(*own.values()):
            yield Choice.from_dict(dict(zip(own, values)) | first)

    def launches(self, kernel: Choice) -> Iterator[Choice]:
        """The kernel with every combination of the launch axes."""
        own = {axis: values for axis, values in self.axes.items() if axis in LAUNCH_AXES}
        for values in itertools.product(*own.values()):
            yield replace(kernel, config=replace(kernel.config, **dict(zip(own, values))))


def load_space(text: str) -> Space:
    """``quick``, ``FILE:NAME`` or ``FILE`` (its sub-space ``default``). UsageError with line and rule."""
    file, _, name = text.rpartition(":") if text.partition(":")[1] else ("", "", text)
    if not file and name.endswith((".yaml", ".yml")):
        file, name = name, "default"
    path = Path(file) if file else paths.tuning_dir() / "spaces" / "sm90.yaml"
    spaces = read_spaces(path)
    if name not in spaces:
        raise UsageError(f"{path.name} has no space {name!r}{nearest(name, spaces)} (spaces: {', '.join(spaces)})", rule="space-name")
    return spaces[name]


def read_spaces(path: Path) -> dict[str, Space]:
    problems: list[Problem] = []
    root = parse(read(path), path, problems)
    found: dict[str, Space] = {}
    with Fields(root, "the space file", problems) as top:
        top.text("schema", choices=(SCHEMA,))
        for name, line, node in top.mappings("spaces"):
            space = _space(name, line, node, problems)
            if space is not None:
                found[name] = space
    if problems:
        first = sorted(problems)[0]
        raise UsageError(f"{path}:{first.line}: {first.rule}: {first.message}", rule=first.rule)
    return found


def _space(name: str, line: int, node: Located, problems: list[Problem]) -> Space | None:
    before = len(problems)
    axes: dict[str, tuple[Any, ...]] = {}
    with Fields(node, f"space {name!r}", problems) as space:
        for axis in _DEFAULTS:
            if axis != "trace" and space.node(axis, required=False) is not None:
                before_axis = len(problems)
                values = [item.plain() for item in space.items(axis, required=False)]
                for value in values:
                    if type(value) is not type(_DEFAULTS[axis]):
                        space.bad(space.line_of(axis), "wrong-type", f"axis {axis}: {value!r} is not like {_DEFAULTS[axis]!r}")
                if not values and len(problems) == before_axis:
                    space.bad(space.line_of(axis), "bad-value", f"axis {axis} has no values")
                axes[axis] = tuple(dict.fromkeys(values))
    if len(problems) > before:
        return None
    made = Space(name, axes)
    if made.size > MAX_COMBINATIONS:
        problems.append(Problem(line, "space-size", f"space {name!r} has {made.size} combinations; at most {MAX_COMBINATIONS} are expanded"))
        return None
    return made


@dataclass
class Expansion:
    """``candidates`` are resolved (stages and registers filled in), so equal kernels are equal objects. ``refused``: rule
    -> count. ``example``: rule -> one explanation. ``same``: combinations that resolve to a candidate that is there already.
    """

    generated: int = 0
    candidates: list[Choice] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    example: dict[str, str] = field(default_factory=dict)
    same: int = 0

    def accounts(self) -> dict[str, Any]:
        """Where every generated combination went; the sum is ``generated``."""
        total = len(self.candidates) + self.same + sum(self.refused.values())
        assert total == self.generated, f"{self.generated} generated, {total} accounted for"
        return {"generated": self.generated, "candidates": len(self.candidates), "same": self.same, "refused": dict(self.refused.most_common())}


def expand(space: Space, shape: Shape, ranks: int, sms: int | None, extra: Sequence[Choice] = ()) -> Expansion:
    """The space's legal kernels for this shape, and ``extra`` ones (named by hand, the incumbents), which are refused
    with a UsageError instead of a count. ``sms``: what the ranks share, None where each has a GPU."""
    found = Expansion()
    seen: dict[Choice, None] = {}
    for choice in extra:
        verdict = check(choice.config, shape, ranks, sms, choice.ctas or None)
        if not verdict:
            raise UsageError(f"illegal configuration ({verdict.rule}): {verdict.explanation}", rule=verdict.rule)
        found.generated += 1
        found.same += (own := resolved(choice, shape, ranks)) in seen
        seen[own] = None
    per_kernel = space.size // max(1, sum(1 for _ in space.kernels()))
    for kernel in space.kernels():
        found.generated += per_kernel
        plain = replace(kernel, config=replace(kernel.config, lag=0, unit_blocks=1))
        verdict = check(plain.config, shape, ranks, sms, kernel.ctas or None)
        if not verdict:
            found.refused[verdict.rule] += per_kernel
            found.example.setdefault(verdict.rule, verdict.explanation)
            continue
        settled = resolved(plain, shape, ranks)
        settled = replace(settled, config=replace(settled.config, lag=kernel.config.lag, unit_blocks=kernel.config.unit_blocks))
        for choice in space.launches(settled):
            bounds = check(choice.config, shape, ranks, sms, choice.ctas or None)
            if not bounds:
                found.refused[bounds.rule] += 1
                found.example.setdefault(bounds.rule, bounds.explanation)
                continue
            found.same += choice in seen
            seen[choice] = None
    found.candidates = list(seen)
    found.accounts()
    return found


def resolved(choice: Choice, shape: Shape, ranks: int) -> Choice:
    """The same choice with stages and registers filled in."""
    return replace(choice, config=resolve(choice.config, shape, ranks))


def kernels_of(choices: Sequence[Choice]) -> list[KernelConfig]:
    """The distinct kernels to compile: choices that differ in launch parameters only share one."""
    distinct: dict[KernelConfig, KernelConfig] = {}
    for choice in choices:
        distinct.setdefault(replace(choice.config, lag=0, unit_blocks=1), choice.config)
    return list(distinct.values())
