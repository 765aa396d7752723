"""The declared space: what is generated is accounted for, and the one predicate decides."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megamoe_cli import config as kernel_config
from megamoe_cli import paths
from megamoe_cli.config import KernelConfig, check
from megamoe_cli.errors import UsageError
from megamoe_cli.tuning.schema import Choice
from megamoe_cli.tuning.space import Product, Space, expand, kernels_of, load_space, read_spaces, resolved
from tests.tuning.tables_at_hand import SHAPE


def test_the_shipped_spaces() -> None:
    found = read_spaces(paths.tuning_dir() / "spaces" / "sm90.yaml")
    assert list(found) == ["quick", "default", "full"]
    sizes = [len(expand(space, SHAPE, 1, 132).candidates) for space in found.values()]
    assert sizes == sorted(sizes) and sizes[0] >= 6


@settings(max_examples=30, deadline=None)
@given(axes=st.fixed_dictionaries({}, optional={
    "block_m": st.lists(st.sampled_from([16, 32, 48, 64, 128]), min_size=1, max_size=3, unique=True),
    "block_n": st.lists(st.sampled_from([128, 256]), min_size=1, max_size=2, unique=True),
    "stages": st.lists(st.sampled_from([0, 1, 3, 4, 8]), min_size=1, max_size=3, unique=True),
    "lag": st.lists(st.integers(0, 70000), min_size=1, max_size=3, unique=True),
    "ctas": st.lists(st.sampled_from([0, 64, 133]), min_size=1, max_size=2, unique=True)}))
def test_generated_is_candidates_and_same_and_refused(axes) -> None:
    space = Space("s", (Product({axis: tuple(values) for axis, values in axes.items()}),))
    found = expand(space, SHAPE, 1, 132)
    accounts = found.accounts()
    assert accounts["generated"] == space.size == accounts["candidates"] + accounts["same"] + sum(accounts["refused"].values())
    assert len(set(found.candidates)) == len(found.candidates)
    for choice in found.candidates:
        assert check(choice.config, SHAPE, 1, 132, choice.ctas or None) and choice.config.stages >= 2 and choice.config.regs_math
    assert set(found.example) == set(found.refused)


def test_refusals_are_counted_by_rule() -> None:
    found = expand(Space("s", (Product({"block_m": (48, 64), "stages": (0, 8), "ctas": (0, 200)}),)), SHAPE, 1, 132)
    assert found.refused == {"allowed-values": 4, "shared-memory": 2, "co-residency": 1} and len(found.candidates) == 1
    assert "200 CTAs" in found.example["co-residency"]


def test_what_the_kernel_learns_becomes_a_candidate(monkeypatch) -> None:
    space = Space("s", (Product({"cluster": (1, 2)}),))
    monkeypatch.setattr(kernel_config, "NOT_IMPLEMENTED", frozenset({("cluster", 2)}))
    assert expand(space, SHAPE, 1, 132).refused == {"not-implemented": 1}
    monkeypatch.setattr(kernel_config, "NOT_IMPLEMENTED", frozenset())
    assert len(expand(space, SHAPE, 1, 132).candidates) == 2


def test_stages_by_number_and_automatic_are_one_kernel() -> None:
    found = expand(Space("s", (Product({"stages": (0, 4)}),)), SHAPE, 1, 132)
    assert (len(found.candidates), found.same) == (1, 1)


def test_launch_parameters_cost_no_kernel() -> None:
    choices = expand(Space("s", (Product({"lag": (1, 2, 3), "unit_blocks": (1, 2), "block_m": (64, 128), "ctas": (0, 64)}),)), SHAPE, 1, 132).candidates
    assert len(choices) == 24 and len(kernels_of(choices)) == 2


def test_a_configuration_named_by_hand_must_be_legal() -> None:
    with pytest.raises(UsageError, match="allowed-values"):
        expand(Space("s", (Product({}),)), SHAPE, 1, 132, [Choice(KernelConfig(block_m=48))])
    extra = Choice(KernelConfig(lag=77))
    assert resolved(extra, SHAPE, 1) in expand(Space("s", (Product({}),)), SHAPE, 1, 132, [extra]).candidates


def test_axes_that_are_left_out_keep_their_default() -> None:
    (choice,) = expand(Space("s", (Product({"block_m": (64,)}),)), SHAPE, 1, 132).candidates
    assert choice == resolved(Choice(KernelConfig(block_m=64)), SHAPE, 1)
    (choice,) = expand(Space("s", (Product({"lag": (9,)}),)), SHAPE, 1, 132).candidates
    assert choice == resolved(Choice(KernelConfig(lag=9)), SHAPE, 1)


def test_virtual_ranks_bound_the_grid() -> None:
    assert expand(Space("s", (Product({"ctas": (16, 17)}),)), replace(SHAPE, experts=256), 8, 132).refused == {"co-residency": 1}


@pytest.mark.parametrize(("text", "words"), [
    ("schema: megamoe.space/2\nspaces: {}\n", "megamoe.space/1"),
    ("schema: megamoe.space/1\nspaces:\n  a: {blok_m: [64]}\n", ":3: unknown-key: space 'a' has no key 'blok_m'; did you mean 'block_m'?"),
    ("schema: megamoe.space/1\nspaces:\n  a: {block_m: [64, big]}\n", ":3: wrong-type: axis block_m: 'big'"),
    ("schema: megamoe.space/1\nspaces:\n  a: {block_m: 64}\n", "must be a list"),
    ("schema: megamoe.space/1\nspaces:\n  a: {block_m: []}\n", "no values"),
    ("schema: megamoe.space/1\nspaces:\n  a: {lag: [" + ", ".join(map(str, range(600))) + "], unit_blocks: [" + ", ".join(map(str, range(1, 600))) + "]}\n",
     "space-size"),
    ("a: [", "no"),
])
def test_a_bad_space_file_names_line_and_rule(tmp_path, text, words) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        load_space(f"{path}:a")
    assert words in str(caught.value)


def test_an_unknown_space_names_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean 'quick'"):
        load_space("quik")


def test_a_space_may_be_a_union(tmp_path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text("schema: megamoe.space/1\nspaces:\n  a:\n    - {block_m: [32, 64], lag: [8, 16]}\n    - {block_m: [64, 128], lag: [16]}\n")
    found = expand(load_space(f"{path}:a"), SHAPE, 1, 132)
    assert (found.generated, len(found.candidates), found.same) == (6, 5, 1)
    path.write_text("schema: megamoe.space/1\nspaces:\n  a: []\n")
    with pytest.raises(UsageError, match=":3: bad-value: space 'a' has no axes"):
        load_space(f"{path}:a")
    path.write_text("schema: megamoe.space/1\nspaces:\n  a: [{block_m: [32]}, {blok_m: [64]}]\n")
    with pytest.raises(UsageError, match="unknown-key.*blok_m"):
        load_space(f"{path}:a")


def test_shipped_spaces_leave_nothing_out_by_hand(monkeypatch) -> None:
    """Every value that the predicate knows of is in `full`; what the kernel lacks is refused, not missing."""
    monkeypatch.setattr(kernel_config, "NOT_IMPLEMENTED", frozenset())
    full, default = (load_space(name).products for name in ("full", "default"))
    for axis, values in kernel_config.ALLOWED.items():
        if axis not in ("trace", "block_k"):
            wanted = {v for v in values if v != "auto"}
            assert wanted <= {v for product in full for v in product.axes.get(axis, ())}, axis
    kernels = kernels_of(expand(load_space("default"), SHAPE, 1, 132).candidates)
    assert {k.policy for k in kernels} == set(kernel_config.ALLOWED["policy"]) and {k.promotion for k in kernels} == {"classic", "rescale"}
    assert {k.cluster for k in kernels} == {1, 2} and {k.math_threads for k in kernels} == {128, 256} and len(kernels) <= 110 and default
