"""The candidates of a tuning run: a declared space, expanded, pruned by the one predicate, and accounted for.

Every combination that was generated is afterwards in exactly one place: a candidate, refused by a named rule, or the same
kernel as another one. ``Expansion.accounts`` says so in numbers.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from megamoe_cli import paths
from megamoe_cli.config import LAUNCH_FIELDS, KernelConfig, check, resolve
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
LAUNCH_AXES = LAUNCH_FIELDS
_DEFAULTS: dict[str, Any] = {f.name: f.default for f in fields(KernelConfig)} | {"ctas": 0}


@dataclass(frozen=True)
class Product:
    """Every combination of its axes: axis -> values."""

    axes: Mapping[str, tuple[Any, ...]]

    @property
    def size(self) -> int:
        return math.prod(len(values) for values in self.axes.values())

    @property
    def per_kernel(self) -> int:
        """Combinations of the launch axes."""
        return math.prod(len(values) for axis, values in self.axes.items() if axis in LAUNCH_AXES)

    def kernels(self) -> Iterator[Choice]:
        """Every combination of the axes that make a kernel, with the first value of each launch axis."""
        first = {axis: values[0] for axis, values in self.axes.items() if axis in LAUNCH_AXES}
        own = {axis: values for axis, values in self.axes.items() if axis not in LAUNCH_AXES}
        for values in itertools.product(*own.values()):
            yield Choice.from_dict(dict(zip(own, values)) | first)

    def launches(self, kernel: Choice) -> Iterator[Choice]:
        """The kernel with every combination of the launch axes, first values first."""
        own = {axis: values for axis, values in self.axes.items() if axis in LAUNCH_AXES}
        for values in itertools.product(*own.values()):
            yield replace(kernel, config=replace(kernel.config, **dict(zip(own, values))))


@dataclass(frozen=True)
class Space:
    """One named sub-space: the union of some products."""

    name: str
    products: tuple[Product, ...]

    @property
    def size(self) -> int:
        return sum(product.size for product in self.products)


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
    nodes = node.value if isinstance(node.value, list) else [node]
    if not nodes:
        problems.append(Problem(line, "bad-value", f"space {name!r} has no axes"))
    made = Space(name, tuple(_product(name, item, problems) for item in nodes))
    if len(problems) > before:
        return None
    if made.size > MAX_COMBINATIONS:
        problems.append(Problem(line, "space-size", f"space {name!r} has {made.size} combinations; at most {MAX_COMBINATIONS} are expanded"))
        return None
    return made


def _product(name: str, node: Located, problems: list[Problem]) -> Product:
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
    return Product(axes)


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
    for product in space.products:
        for kernel in product.kernels():
            _add_kernel(product, kernel, shape, ranks, sms, found, seen)
    found.candidates = list(seen)
    found.accounts()
    return found


def _add_kernel(product: Product, kernel: Choice, shape: Shape, ranks: int, sms: int | None, found: Expansion, seen: dict[Choice, None]) -> None:
    """One kernel with all its launch parameters, each counted once."""
    found.generated += product.per_kernel
    plain = replace(kernel, config=kernel_key(kernel.config))
    verdict = check(plain.config, shape, ranks, sms, kernel.ctas or None)
    if not verdict:
        found.refused[verdict.rule] += product.per_kernel
        found.example.setdefault(verdict.rule, verdict.explanation)
        return
    settled = resolved(plain, shape, ranks)
    settled = replace(settled, config=replace(settled.config, **{axis: getattr(kernel.config, axis) for axis in LAUNCH_AXES}))
    for choice in product.launches(settled):
        bounds = check(choice.config, shape, ranks, sms, choice.ctas or None)
        if not bounds:
            found.refused[bounds.rule] += 1
            found.example.setdefault(bounds.rule, bounds.explanation)
            continue
        found.same += choice in seen
        seen[choice] = None


def resolved(choice: Choice, shape: Shape, ranks: int) -> Choice:
    """The same choice with stages and registers filled in."""
    return replace(choice, config=resolve(choice.config, shape, ranks))


def kernel_key(config: KernelConfig) -> KernelConfig:
    """What is compiled: configurations that differ in launch parameters only have one key."""
    return replace(config, **{axis: _DEFAULTS[axis] for axis in LAUNCH_AXES})


def kernels_of(choices: Sequence[Choice]) -> list[KernelConfig]:
    """The distinct kernels to compile: choices that differ in launch parameters only share one."""
    distinct: dict[KernelConfig, KernelConfig] = {}
    for choice in choices:
        distinct.setdefault(kernel_key(choice.config), choice.config)
    return list(distinct.values())
