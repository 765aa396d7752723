"""Synthetic routers keep what their names promise."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megamoe_cli.errors import UsageError
from megamoe_cli.routing import ROUTINGS, Routing, check_ids, derive_seed, parse_routing, route
from megamoe_cli.shapes import Problem, Shape

NAMES = [n for n in ROUTINGS if n != "fixed"]


def problem(ranks=4, local=4, topk=3, tokens=64) -> Problem:
    return Problem.make(Shape(128, 128, ranks * local, topk), ranks, tokens)


def distinct(ids: torch.Tensor) -> bool:
    return all(len(set(row)) == len(row) for row in ids.tolist())


@pytest.mark.parametrize("name", NAMES)
def test_form_seed_and_independence_of_ranks(name):
    p = problem()
    ids, weights = route(name, p, 2, seed=5)
    assert ids.shape == weights.shape == (64, 3) and ids.dtype == torch.int64 and weights.dtype == torch.float32
    assert ids.is_contiguous() and weights.is_contiguous()
    check_ids(ids, p.shape.experts)
    assert weights[ids >= 0].isfinite().all() and (weights[ids >= 0] > 0).all() and weights[ids < 0].isnan().all()
    again = route(name, p, 2, seed=5)
    assert torch.equal(ids, again[0]) and torch.equal(weights.nan_to_num(), again[1].nan_to_num())
    for other in (route(name, p, 2, seed=6), route(name, p, 2, seed=5, launch=1), route(name, p, 1, seed=5)):
        assert not torch.equal(weights.nan_to_num(), other[1].nan_to_num())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tokens", [0, 1])
def test_no_tokens_and_one(name, tokens):
    ids, weights = route(name, problem(tokens=tokens), 0, seed=1)
    assert ids.shape == weights.shape == (tokens, 3)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(NAMES), st.integers(1, 6), st.integers(1, 5), st.integers(0, 20), st.integers(0, 99), st.data())
def test_ids_are_legal_and_distinct(name, ranks, local, tokens, seed, data):
    experts = ranks * local
    p = problem(ranks, local, data.draw(st.integers(1, min(32, experts))), tokens)
    if name == "remote" and ranks == 1:
        with pytest.raises(UsageError, match="at least 2 ranks"):
            route(name, p, 0, seed)
        return
    rank = data.draw(st.integers(0, ranks - 1))
    ids, _ = route(name, p, rank, seed)
    check_ids(ids, experts)
    available = {"local": local, "remote": experts - local}.get(name, experts)
    if name != "masked" and p.shape.topk <= available:
        assert distinct(ids)
    mine = (ids // local == rank)
    assert name != "local" or mine.all()
    assert name != "remote" or not mine.any()


def test_one_hot():
    for text, hot in (("one-hot-expert", 0), ("one-hot-expert:7", 7)):
        ids, _ = route(text, problem(), 1, seed=3)
        assert (ids[:, 0] == hot).all() and (ids[:, 1:] != hot).all() and distinct(ids)
        assert len(ids[:, 1:].unique()) == 15
    with pytest.raises(UsageError, match="16 experts"):
        route("one-hot-expert:16", problem(), 1, seed=3)


def test_powerlaw_is_skewed_alike_on_all_ranks():
    p = problem(tokens=2000)
    counts = [torch.bincount(route("powerlaw", p, r, seed=9)[0].flatten(), minlength=16) for r in range(4)]
    assert len({int(c.argmax()) for c in counts}) == 1
    total = sum(counts).sort(descending=True).values.double()
    assert total[0] > 4 * total[-1] and total[-1] > 0
    flat = torch.bincount(route("powerlaw:0", p, 0, seed=9)[0].flatten(), minlength=16).double()
    assert flat.max() / flat.min() < 1.4
    first = route("powerlaw:4", p, 0, seed=9)[0]
    hot = int(torch.bincount(first.flatten()).argmax())
    assert min(int((first[:, k] == hot).sum()) for k in range(3)) > 400, "the popular expert sits in every slot"


@pytest.mark.parametrize("share", [0.1, 0.3, 0.7])
def test_masked_share_and_whole_rows(share):
    ids, weights = route(f"masked:{share}", problem(tokens=4000), 0, seed=2)
    masked = ids < 0
    assert abs(float(masked.float().mean()) - share) < 0.03
    whole = masked.all(dim=1)
    assert whole.any() and (masked.any(dim=1) & ~whole).any() and weights[masked].isnan().all()


def test_masked_extremes():
    assert (route("masked:1", problem(), 0, 2)[0] == -1).all()
    assert (route("masked:0", problem(), 0, 2)[0] >= 0).all()
    for seed in range(20):  # two tokens suffice for one whole row and one that is not
        whole = (route("masked:0.05", problem(tokens=2), 0, seed)[0] < 0).all(dim=1)
        assert whole.sum() == 1


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 16), st.integers(1, 16), st.integers(0, 20), st.data())
def test_balanced(ranks, local, tokens, data):
    p = problem(ranks, local, data.draw(st.integers(1, min(32, ranks * local))), tokens)
    everything = [route("balanced", p, r, 4)[0] for r in range(ranks)]
    for ids in [*everything, torch.cat(everything)]:  # each source by itself, and all together
        assert distinct(ids)
        per_expert = torch.bincount(ids.flatten(), minlength=ranks * local)
        per_rank = per_expert.view(ranks, local).sum(1)
        assert per_rank.max() - per_rank.min() <= 1 and per_expert.max() - per_expert.min() <= 1


def test_balanced_reported_case():
    """16 ranks, 256 experts, top 8, 8 tokens: a router that left every other rank empty once passed as balanced."""
    ids, _ = route("balanced", problem(16, 16, 8, 8), 0, seed=0)
    assert torch.bincount(ids.flatten() // 16, minlength=16).tolist() == [4] * 16


def test_fixed_and_local_repeats():
    ids, weights = route("fixed:0,1,2;3,-1,-1", problem(tokens=5), 0, seed=1)
    assert ids.tolist() == [[0, 1, 2], [3, -1, -1]] * 2 + [[0, 1, 2]]
    assert weights[1, 1:].isnan().all() and weights[1, 0] > 0
    with pytest.raises(UsageError, match="2 ids, topk is 3"):
        route("fixed:0,1", problem(), 0, 1)
    ids, _ = route("local", problem(local=2, topk=5), 3, 1)  # more slots than experts: repeats, evenly
    assert ((ids == 6).sum(1) >= 2).all() and ((ids == 7).sum(1) >= 2).all()


@pytest.mark.parametrize("text", ["uniform", "powerlaw:2", "one-hot-expert:3", "masked:0.5", "fixed:0,1;2,-1"])
def test_parse_round_trip(text):
    assert str(parse_routing(text)) == text and parse_routing(str(parse_routing(text))) == parse_routing(text)


@pytest.mark.parametrize(("text", "word"), [
    ("unifrom", "nearest name: uniform"), ("onehot", "nearest name: one-hot-expert"), ("uniform:3", "no argument"),
    ("masked:1.5", "out of range"), ("masked:x", "cannot read 'x'"), ("one-hot-expert:-1", "out of range"),
    ("fixed", "cannot read"), ("fixed:a", "cannot read"), ("powerlaw:nan", "out of range"), ("masked:", "cannot read"),
])  # fmt: skip
def test_bad_routing_text(text, word):
    with pytest.raises(UsageError, match=word) as caught:
        parse_routing(text)
    assert caught.value.rule == "routing-name" and "\n" not in str(caught.value)


def test_check_ids_names_the_place():
    ids = torch.zeros(4, 3, dtype=torch.int64)
    check_ids(ids, 8)
    check_ids([ids, torch.full((1, 3), -1)], 8)
    check_ids(torch.zeros(0, 3, dtype=torch.int64), 8)
    for value in (8, -2, 2**40):
        bad = ids.clone()
        bad[2, 1] = value
        with pytest.raises(UsageError, match=rf"rank 1, token 2, slot 1: expert id {value} .*0\.\.7.*1 bad") as caught:
            check_ids([ids, bad], 8)
        assert caught.value.rule == "expert-id"
    for dtype in (torch.int32, torch.int16, torch.float32):
        with pytest.raises(UsageError, match="int64") as caught:
            check_ids(ids.to(dtype), 8, rank=3)
        assert caught.value.rule == "dtype" and "rank 3" in str(caught.value)


def test_seeds_do_not_collide():
    assert len({derive_seed(1, a, b) for a in range(50) for b in range(50)}) == 2500
    assert derive_seed(1, "x", 12) != derive_seed(1, "x1", 2) and 0 <= derive_seed(0) < 2**63
    assert Routing("uniform") == parse_routing("uniform")
