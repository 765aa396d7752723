"""Shape rules: what is legal stays legal, what is not is named with its numbers and the nearest legal value."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megamoe_cli import shapes
from megamoe_cli.errors import ExitCode, UsageError
from megamoe_cli.shapes import NAMED_SHAPES, Problem, Shape, check_problem, check_shape, parse_shape


def refused(rule: str, *words: str):
    """Context: UsageError of this rule, exit code 2, one line, with these words."""

    class _Context:
        def __enter__(self):
            return self

        def __exit__(self, kind, error, trace):
            assert kind is not None and issubclass(kind, UsageError), f"not refused ({kind})"
            assert error.rule == rule and rule in shapes.RULES
            assert error.exit_code == ExitCode.USAGE
            assert "\n" not in str(error) and all(w in str(error) for w in words), str(error)
            return True

    return _Context()


def test_named_shapes_parse_and_print():
    for name, shape in NAMED_SHAPES.items():
        assert parse_shape(name) == parse_shape(name.upper()) == parse_shape(str(shape)) == shape
        assert shape.name == name
        check_shape(shape, 8)
    assert parse_shape("512x384x24x3") == Shape(512, 384, 24, 3)
    assert NAMED_SHAPES["pro"].as_list() == [7168, 3072, 384, 6]


@pytest.mark.parametrize(("text", "words"), [
    ("flsh", ("flsh", "nearest name: flash")), ("prp", ("nearest name: pro",)), ("256x256", ("2 numbers",)),
    ("256x-1x4x2", ("256x-1x4x2",)), ("", ("nearest name",)), ("1x2x3x4x5", ("5 numbers",)),
])  # fmt: skip
def test_bad_shape_text(text, words):
    with refused("shape-name", *words):
        parse_shape(text)


@pytest.mark.parametrize(("shape", "ranks", "rule", "words"), [
    (Shape(200, 256, 8, 2), 1, "hidden-multiple", ("200", "128 or 256", "1*128 + 72")),
    (Shape(0, 256, 8, 2), 1, "hidden-multiple", ("hidden=0",)),
    (Shape(256, 96, 8, 2), 1, "intermediate-multiple", ("96", "nearest: 128")),
    (Shape(256, 256, 10, 2), 4, "experts-divisible", ("experts=10", "ranks=4", "2 or 5")),
    (Shape(256, 256, 256, 2), 3, "experts-divisible", ("2 or 4",)),
    (Shape(256, 256, 7, 2), 32, "experts-divisible", ("nearest legal rank counts: 7",)),
    (Shape(256, 256, 0, 1), 1, "experts-divisible", ("experts=0",)),
    (Shape(256, 256, 66, 2), 33, "ranks-limit", ("33", "nearest: 32")),
    (Shape(256, 256, 8, 2), 0, "ranks-limit", ("ranks=0", "nearest: 1")),
    (Shape(256, 256, 8, 0), 1, "topk-range", ("topk=0", "nearest: 1")),
    (Shape(256, 256, 64, 33), 1, "topk-range", ("33", "nearest: 32")),
    (Shape(256, 256, 8, 9), 1, "topk-range", ("experts=8", "nearest: 8")),
])  # fmt: skip
def test_illegal_shapes(shape, ranks, rule, words):
    with refused(rule, *words):
        check_shape(shape, ranks)


@settings(deadline=None)
@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 32), st.integers(1, 16), st.data())
def test_every_legal_shape_is_accepted(h, i, ranks, local, data):
    shape = Shape(128 * h, 128 * i, ranks * local, data.draw(st.integers(1, min(32, ranks * local))))
    tokens = data.draw(st.lists(st.integers(0, 300), min_size=ranks, max_size=ranks))
    problem = Problem.make(shape, ranks, tokens)
    check_problem(problem)
    assert problem.pool_rows % 128 == 0 and problem.capacity % 128 == 0 and problem.capacity >= max(tokens)
    # the worst case really fits: all rows on one expert, one row on each other
    worst = ranks * problem.capacity * shape.topk
    needed = sum(-(-n // 128) * 128 for n in [worst - local + 1] + [1] * (local - 1)) if worst >= local else 128 * worst
    assert needed <= problem.pool_rows


@settings(deadline=None)
@given(st.integers(1, 400), st.integers(1, 40))
def test_suggested_rank_counts_are_legal(experts, ranks):
    try:
        check_shape(Shape(128, 128, experts, 1), ranks)
    except UsageError as error:
        if error.rule == "experts-divisible":
            suggested = str(error).split("counts: ")[1].rstrip(")").split(" or ")
            assert suggested and all(experts % int(r) == 0 and 1 <= int(r) <= 32 for r in suggested)
        else:
            assert ranks > 32
    else:
        assert experts % ranks == 0 and ranks <= 32


def test_problem_rules():
    tiny = NAMED_SHAPES["tiny"]
    with refused("tokens-capacity", "rank 1", "65 tokens", "capacity is 64", "128"):
        check_problem(Problem(tiny, 2, (64, 65), 64))
    with refused("tokens-per-rank", "3 token counts", "2 ranks"):
        check_problem(Problem(tiny, 2, (1, 2, 3), 128))
    with refused("tokens-per-rank", "rank 1", "-1"):
        check_problem(Problem(tiny, 2, (1, -1), 128))
    with refused("capacity-equal", "64", "128", "rank 1"):
        check_problem(Problem(tiny, 2, (1, 1), 64), [64, 128])
    with refused("capacity-equal", "capacity=0"):
        check_problem(Problem(tiny, 2, (0, 0), 0))
    with refused("index-range", "pool rows"):
        check_problem(Problem.make(NAMED_SHAPES["v3"], 32, 0, 1 << 23))
    check_problem(Problem(tiny, 2, (0, 64), 64))
    assert Problem.make(tiny, 4, 7).tokens == (7, 7, 7, 7)
    assert Problem.make(tiny, 8, 0).owner(15) == 7


def test_dtypes_shapes_strides():
    shapes.check_dtype("topk_idx", "torch.int64")
    with refused("dtype", "topk_idx is int32", "int64"):
        shapes.check_dtype("topk_idx", "torch.int32")
    with refused("dtype", "x_sf is uint8", "float32"):
        shapes.check_dtype("x_sf", "uint8")
    with refused("tensor-shape", "(3, 4)", "(3, 5)"):
        shapes.check_tensor("x_sf", "float32", (3, 4), (3, 5))
    with refused("tensor-stride", "(1, 3)", "(4, 1)"):
        shapes.check_tensor("x_sf", "float32", (3, 4), (3, 4), (1, 3))
    shapes.check_tensor("x_sf", "float32", (1, 4), (1, 4), (999, 1))  # the stride of one row says nothing
    shapes.check_tensor("x_sf", "float32", (0, 4), (0, 4), (1, 1))
    shapes.check_tensor("x_sf", "float32", (3, 4), (3, 4), (1, 3), (1, 3))


def test_formats_architectures_activations_clamps():
    assert shapes.check_architecture("90a") == shapes.check_architecture("sm_90a") == "sm_90a"
    for bad in ("90", 90, "sm_90", "sm_100a", "89"):
        with refused("architecture", str(bad), "sm_90a"):
            shapes.check_architecture(bad)
    for bad in ("mxfp4", "e5m2", "int8"):
        with refused("weight-format", bad, "e4m3"):
            shapes.check_weight_format(bad)
    shapes.check_weight_format("e4m3")
    with refused("activation", "swigluoai", "swiglu"):
        shapes.check_activation("swigluoai")
    for bad in (-1.0, float("nan"), float("inf")):
        with refused("clamp", str(bad)):
            shapes.check_clamp(bad)
    shapes.check_clamp(0.0)
    shapes.check_clamp(None)


def test_no_torch_on_import():
    code = "import sys, megamoe_cli.shapes, megamoe_cli.routing, megamoe_cli.cases; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True,
                         cwd=shapes.__file__.rsplit("/", 2)[0])  # fmt: skip
    assert out.stdout.strip() == "False"
