"""``megamoe bench`` beside other contenders, the preset rows, the protocol's cost; with stand-ins for what measures."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from megamoe_cli import bench
from megamoe_cli.bench import Estimate, Rival, peer, peer_build, protocol_cost
from megamoe_cli.bench.contender import ContenderFailed
from megamoe_cli.bench.measured import ratios
from megamoe_cli.config import KernelConfig


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Ours takes 60 us, the peer 100; ``fails`` maps a token count to what the peer does there instead."""
    machine = SimpleNamespace(ours=60.0, version="0.1.4", fails={}, opened=[], measured=[], built=[], closed=0)

    class FakeBench:
        def __init__(self, shape, seed, against=()):
            machine.opened.append((shape.experts, tuple(against)))
            self.backend, self.against = SimpleNamespace(where="virtual(1 on 1xH200)"), against

        def measure(self, tokens, config, *, samples, say, **more):
            machine.measured.append((tokens, more))
            if tokens in machine.fails:
                raise machine.fails[tokens]
            own = {mode: Estimate.of([machine.ours * (1 + n / 100) for n in range(samples)]) for mode in ("kernel", "cold", "in_a_row", "graph")}
            theirs = {mode: Estimate.of([100.0 * (1 + n / 100) for n in range(samples)]) for mode in own}
            rivals = tuple(Rival(name, machine.version, theirs, ratios(own, theirs), (0.037, 0.05)) for name in self.against)
            k = own["kernel"]
            return bench.Row("x", tokens, k.us, k.low_us, k.high_us, k.us, 50.0, 10.0, samples, 4.0, config.name(), 0.0, k.times_us, own, rivals)

        def close(self):
            machine.closed += 1

    monkeypatch.setattr(bench, "Bench", FakeBench)
    monkeypatch.setattr(peer, "check_installed", lambda: None)
    monkeypatch.setattr(peer, "load_package", lambda: SimpleNamespace())
    monkeypatch.setattr(peer_build, "build", lambda rows, say: machine.built.append(rows) or [])
    monkeypatch.setattr("megamoe_cli.backends.driver.visible_gpus", lambda: [SimpleNamespace(is_sm90=True)])
    monkeypatch.setenv("MEGAMOE_RESULTS_DIR", "out")
    return machine


ARGS = ("bench", "--table", "none")


def test_the_preset_rows(megamoe, gpu) -> None:
    answer = megamoe(*ARGS, "--rows", "peer", "--against", "peer")
    assert answer.code == 0 and len(gpu.measured) == 38 and [e for e, _ in gpu.opened] == [32, 48, 32]
    assert gpu.built[0] and sum(map(len, gpu.built[0].values())) == 38 and gpu.closed == 3
    lines = answer.out.splitlines()
    assert sum("ours/peer 0.600 (0.600-0.600)" in line for line in lines) == 38
    assert "to reach 0.59: ahead" in lines[2], "flash at 1 token"
    assert lines[-1] == "ours/peer: geomean 0.600 over 38 rows, 38 ahead, 32 of 38 at the ratio to reach"
    assert lines[-2] == "38 rows on virtual(1 on 1xH200)"
    gpu.ours = 103.0
    document = megamoe(*ARGS, "--rows", "peer", "--against", "peer", "--shape", "pro", "--tokens", "8,64", "--json").json
    assert [(r["shape"], r["tokens"]) for r in document["rows"]] == [("pro", 8), ("pro", 64)]
    (rival,) = document["rows"][0]["rivals"]
    assert rival["verdict"] == "behind" and rival["to_reach"] == pytest.approx(476 / 522.7) and rival["times"]["cold"]["us"] > 100
    assert document["against"] == {"peer": {"geomean": pytest.approx(1.03), "rows": 2, "ahead": 0, "met": 0, "with_target": 2}}


def test_rows_that_have_no_ratio_to_reach(megamoe, gpu) -> None:
    gpu.version = "7.0"
    answer = megamoe(*ARGS, "--shape", "flash", "--tokens", "1,3", "--against", "peer,unfused")
    assert answer.code == 0 and "to reach" not in answer.out and answer.out.count(": ahead;") == 4
    assert answer.out.splitlines()[-2:] == ["ours/peer: geomean 0.600 over 2 rows, 2 ahead", "ours/unfused: geomean 0.600 over 2 rows, 2 ahead"]
    assert gpu.opened == [(32, ("peer", "unfused"))]
    record = json.loads(next(Path("out").glob("*/bench.json")).read_text())
    assert record["exit_code"] == 0 and len(record["rows"][1]["rivals"]) == 2


def test_a_contender_that_fails_costs_its_row(megamoe, gpu) -> None:
    gpu.fails = {8: ContenderFailed("peer", "output wrong (graph): relative difference 0.3 (limit 0.06)")}
    answer = megamoe(*ARGS, "--shape", "flash", "--tokens", "1,8,64", "--against", "peer")
    assert answer.code == 1 and "flash at 8 tokens: peer failed: output wrong" in answer.err
    assert "2 rows on virtual(1 on 1xH200), 1 failed" in answer.out and [t for t, _ in gpu.measured] == [1, 8, 64]
    document = megamoe(*ARGS, "--shape", "flash", "--tokens", "1,8", "--against", "peer", "--json").json
    assert document["exit_code"] == 1 and document["failed"][0]["contender"] == "peer" and len(document["rows"]) == 1


def test_a_contender_that_takes_the_device_down_ends_it(megamoe, gpu) -> None:
    gpu.fails = {8: ContenderFailed("peer", "graph: the device failed: an illegal memory access", fatal=True)}
    answer = megamoe(*ARGS, "--shape", "flash,pro", "--tokens", "1,8,64", "--against", "peer")
    assert answer.code == 1 and "cannot be used any more" in answer.err and [t for t, _ in gpu.measured] == [1, 8]
    assert "1 rows on" in answer.out and "geomean 0.600 over 1 rows" in answer.out, "what was measured before it stays"


def test_not_installed_is_said_in_one_line_before_anything_runs(megamoe, gpu, monkeypatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(peer, "IMPORT_NAME", "a_package_nobody_has")
    for name in ("peer", "unfused-peer"):
        answer = megamoe("bench", "--against", name)
        assert answer.code == 3 and "is not installed here" in answer.err.splitlines()[0] and "Traceback" not in answer.err and not answer.out


@pytest.mark.parametrize("words, said", [
    (("--against", "pear"), "nearest name: peer"), (("--against", ""), "takes names"), (("--rows", "pear"), "nearest name: peer"),
    (("--rows", "peer", "--rank-of", "4"), "one rank of 8"), (("--rows", "peer", "--tokens", "3"), "no row of that set"),
    (("--times", "cold"), "kernel among them"), (("--times", "kernel,hot"), "kernel among them"),
    (("--against", "peer", "--rounds", "3"), "does not go with"), (("--against", "peer", "--save-baseline", "b.json"), "does not go with"),
    (("--protocol-cost", "0"), "positive counts"), (("--protocol-cost", "3", "--shape", "flash"), "3 ranks"),
    (("--protocol-cost", "8", "--tokens", "12"), "12 tokens"), (("--protocol-cost", "2", "--against", "peer"), "no --against"),
])  # fmt: skip
def test_bad_input_is_refused_before_anything_runs(megamoe, gpu, words, said) -> None:
    answer = megamoe("bench", *words)
    assert answer.code == 2 and said in answer.err and len(answer.err.strip().splitlines()) <= 2
    assert not gpu.opened and not gpu.built and not Path("out").exists()


def test_only_the_times_asked_for(megamoe, gpu) -> None:
    megamoe(*ARGS, "--shape", "flash", "--tokens", "1", "--times", "graph,kernel")
    megamoe(*ARGS, "--shape", "flash", "--tokens", "1")
    assert gpu.measured == [(1, {"modes": ("kernel", "graph")}), (1, {})] and gpu.opened == [(32, ())] * 2


def test_our_other_configurations_beside_it(megamoe, gpu) -> None:
    names = "config:split=m+stagger=2500,config:cluster=2"
    answer = megamoe(*ARGS, "--shape", "flash", "--tokens", "1", "--against", names)
    assert answer.code == 0 and gpu.opened == [(32, tuple(names.split(",")))] and "ours/config:split=m+stagger=2500 0.600" in answer.out
    for word, said in (("config:block_m=7", "allowed-values"), ("config:stagger=9", "policy-tile"), ("config:split", "KEY=VALUE")):
        answer = megamoe(*ARGS, "--against", word)
        assert answer.code == 2 and said in answer.err, answer.err
    assert len(gpu.opened) == 1


def test_the_protocols_cost(megamoe, gpu, monkeypatch) -> None:
    asked = []

    def measured(name, shape, tokens, ranks, *, config, samples, seed, say):
        asked.append((name, shape.experts, tokens, ranks, config, samples))
        one = Estimate.of([100.0] * samples)
        return [protocol_cost.Cost(name, size, count, one, Estimate.of([us] * samples), {"median": us / 100, "low": 1.0, "high": 1.3, "pairs": samples}, 0.0)
                for count, us in zip(ranks, (110.0, 120.0)) for size in tokens]  # fmt: skip

    monkeypatch.setattr(protocol_cost, "measure_cost", measured)
    answer = megamoe("bench", "--protocol-cost", "2,8")
    assert answer.code == 0 and asked == [("flash", 256, [4096, 16384], [2, 8], KernelConfig(), 6)]
    words = [line.split() for line in answer.out.splitlines()]
    assert [w[-1] for w in words[1:]] == ["kept", "kept", "exceeded", "exceeded"] and words[1][:6] == ["flash", "4096", "2", "100.0", "110.0", "1.100"]
    document = megamoe("bench", "--protocol-cost", "2", "--tokens", "4096", "--json").json
    assert document["schema"] == "megamoe.protocol-cost/1" and document["costs"][0]["within"] is True and document["sms"] == 128


def test_without_a_gpu(megamoe, gpu, monkeypatch) -> None:
    monkeypatch.setattr("megamoe_cli.backends.driver.visible_gpus", lambda: [])
    for words in (("--against", "peer"), ("--protocol-cost", "2")):
        answer = megamoe("bench", *words)
        assert answer.code == 3 and "no GPU is visible" in answer.err


def test_the_kernels_that_are_built_ahead() -> None:
    from megamoe_cli.cli.bench_cmd import bench_command, requests_of

    costs = requests_of(bench_command.make_context("bench", ["--protocol-cost", "2,8", "--shape", "flash"]).params)
    assert [(r.shape.experts, r.ranks) for r in costs] == [(256, 1), (256, 2), (256, 8)]
    two = requests_of(bench_command.make_context("bench", ["--shape", "flash", "--against", "config:split=m"]).params)
    assert [r.config.split for r in two] == ["auto", "m"]
    assert [r.shape.experts for r in requests_of(bench_command.make_context("bench", ["--rows", "peer"]).params)] == [32, 48, 32]
