"""``megamoe bench --ranks`` with a stand-in for the measuring group: what is refused, what is asked, printed and recorded."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from megamoe_cli.backends.driver import Gpu
from megamoe_cli.bench import over_ranks, peer, peer_ranks
from megamoe_cli.bench.link import facts
from megamoe_cli.compile import driver
from megamoe_cli.protocol import CaseResult
from megamoe_cli.routing import route
from megamoe_cli.shapes import Problem, Shape

ARGS = ("bench", "--ranks", "2", "--shape", "flash", "--table", "none")


class FakeGroup:
    """Answers tasks as the processes would: ours takes 100 us on rank 0 and 120 on rank 1, others twice that."""

    machine: SimpleNamespace

    def __init__(self, command, **rest):
        self.command, self.rest, self.log = command, rest, Path("worker.log")
        self.machine.groups.append(self)

    def ask(self, task, timeout_s):
        task, machine = task["task"], self.machine
        machine.tasks.append(task)
        self.rest["on_stage"]("run ours")
        answer = machine.answer(task)
        if answer is not None:
            return answer
        shape, backend = Shape(*task["shape"]), self.command[self.command.index("--backend") + 1]
        problem = Problem.make(shape, 2, task["tokens"])
        said = facts(problem, [[route("uniform", problem, rank, 1)[0] for rank in (0, 1)]], backend)
        modes = [mode for mode in task["modes"] if mode != "graph" or backend != "virtual"]
        times = {name: {mode: [[f * 100.0, f * 120.0]] * task["samples"] for mode in modes}
                 for name, f in [("ours", 1.0), *((name, 2.0) for name in task["against"])]}
        return CaseResult("x", "pass", where=f"{backend}(2xH200)", metrics=said | {
            "config": "m128", "worst_relative": 0.001, "graphs": "" if "graph" in modes else "no streams", "failed": machine.wrong, "conditions": {},
            "retaken": 0, "overhead_us": 2.0, "contenders": {name: {"version": "1", "times": t, "difference": [0.03, 0.05]} for name, t in times.items()}})

    def restart(self):
        self.machine.restarts += 1

    def end(self):
        return None

    close = end


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    made = SimpleNamespace(groups=[], tasks=[], restarts=0, built=[], wrong={}, compiled=[], uncompiled={}, answer=lambda task: None, gpus=2)
    monkeypatch.setattr(FakeGroup, "machine", made, raising=False)
    monkeypatch.setattr(over_ranks, "RankGroup", FakeGroup)
    monkeypatch.setattr(driver, "build_many", lambda requests, *rest: made.built.extend(requests) or [])
    monkeypatch.setattr(peer, "check_installed", lambda: None)
    monkeypatch.setattr(peer_ranks, "compile_peer", lambda command, rows, say, log_dir: made.uncompiled or made.compiled.extend(rows) or {})
    monkeypatch.setattr("megamoe_cli.backends.driver.visible_gpus", lambda: [Gpu(n, "NVIDIA H200", (9, 0), 132, 232448) for n in range(made.gpus)])
    monkeypatch.setattr("megamoe_cli.backends.picking.visible_gpus", lambda: [Gpu(n, "NVIDIA H200", (9, 0), 132, 232448) for n in range(made.gpus)])
    monkeypatch.setenv("MEGAMOE_RESULTS_DIR", "out")
    return made


def record() -> dict:
    path = min(Path("out").glob("*/bench.json"), key=lambda found: found.stat().st_mtime_ns)
    return json.loads(path.read_text())


@pytest.mark.parametrize(("words", "said"), [
    (("--rank-of", "8"), "no --rank-of with it"), (("--rows", "peer"), "no --rows with it"), (("--protocol-cost", "2"), "no --protocol-cost"),
    (("--save-baseline", "b.json"), "no --save-baseline"), (("--fail-on-regression", "3%"), "no --fail-on-regression"), (("--rounds", "2"), "no --rounds"),
    (("--against", "unfused"), "unfused runs on one rank"), (("--against", "peer", "--backend", "virtual"), "virtual ranks are one process"),
    (("--backend", "emulator"), "--ranks takes --backend auto"), (("--times", "kernel,cold"), "--times cold"), (("--budget", "soon"), "no time such as"),
    (("--ranks", "1"), "use --rank-of 1"), (("--ranks", "7"), "does not divide evenly"), (("--config", "block_m=48"), "illegal configuration"),
    (("--tokens", "0"), "positive counts"), (("--reserve-sms", "4", "--against", "peer"), "uses every SM")])  # fmt: skip
def test_what_is_refused_in_one_line_before_anything_runs(megamoe, machine, words, said) -> None:
    answer = megamoe(*ARGS, *words)
    assert answer.code == 2 and said in answer.err and answer.err.count("error:") == 1, answer.err
    assert not machine.groups and not machine.built


def test_what_goes_with_ranks_only(megamoe, machine, monkeypatch) -> None:
    for words in (("--backend", "virtual"), ("--budget", "5m")):
        answer = megamoe("bench", "--shape", "flash", *words)
        assert answer.code == 2 and "goes with --ranks" in answer.err


def test_what_this_machine_cannot(megamoe, machine, monkeypatch) -> None:
    machine.gpus = 1
    one = megamoe(*ARGS, "--backend", "nvlink")
    assert one.code == 3 and "one rank per GPU" in one.err
    shared = megamoe(*ARGS, "--against", "peer")
    assert shared.code == 2 and "2 ranks share 1xNVIDIA H200" in shared.err
    machine.gpus = 0
    assert megamoe(*ARGS).code == 3
    monkeypatch.undo()
    missing = megamoe(*ARGS, "--against", "peer", "--backend", "nvlink")
    assert missing.code == 3 and "not installed" in missing.err


def test_rows_over_a_link(megamoe, machine) -> None:
    answer = megamoe(*ARGS, "--tokens", "8,512", "--against", "peer,config:split=m", "--samples", "4")
    assert answer.code == 0, answer.err
    assert [(t["tokens"], t["capacity"], t["samples"], t["against"]) for t in machine.tasks] == [(n, c, 4, ["peer", "config:split=m"]) for n, c in ((8, 128), (512, 512))]
    assert [(r.ranks, r.shape.experts) for r in machine.built] == [(2, 256)] * 2, "both configurations, all experts over two ranks"
    (group,) = machine.groups
    assert group.rest["env"] == {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0", "NVSHMEM_DISABLE_NVLS": "1"}
    document = record()
    assert document["schema"] == "megamoe.bench-ranks/1" and document["where"] == "nvlink(2xH200)" and document["exit_code"] == 0
    row = document["rows"][1]
    assert row["kernel_us"] == 120.0 and row["per_rank_us"] == [100.0, 120.0] and row["slowest_rank"] == 1 and row["graph_us"] == 120.0
    assert row["floor_us"] == max(row["weight_floor_us"], row["tensor_floor_us"], row["link_floor_us"]) and row["link"]["nominal_gb_s"] == 450
    assert row["link"]["out_gb_s"] == pytest.approx(row["link"]["out_bytes"] / 120e-6 / 1e9)
    lines = answer.out.splitlines()
    assert "GB/s in" in lines[0] and f"{row['link']['in_bytes'] / 1e6:.2f}" in answer.out and "no link" not in answer.out
    assert lines[-3:] == ["2 rows on nvlink(2xH200)", "ours/peer: geomean 0.500 over 2 rows, 2 ahead", "ours/config:split=m: geomean 0.500 over 2 rows, 2 ahead"]
    report = megamoe("report", document["id"])
    assert report.code == 0 and "nvlink(2xH200)" in report.out


def test_virtual_ranks_show_no_link(megamoe, machine) -> None:
    answer = megamoe(*ARGS, "--tokens", "8", "--backend", "virtual", "--json")
    (row,) = answer.json["rows"]
    assert row["link"]["in_gb_s"] is None and row["link_floor_us"] is None and row["graph_us"] is None and row["no_graph"] == "no streams"
    text = megamoe(*ARGS, "--tokens", "8", "--backend", "virtual").out
    assert "no link" in text and "share a GPU" in text and "no graph: no streams" in text


def test_a_peer_that_takes_the_group_down_costs_its_column(megamoe, machine) -> None:
    machine.answer = lambda task: CaseResult("x", "crash", message="the measuring process exited with 1") if "peer" in task["against"] and task["tokens"] == 64 else None
    answer = megamoe(*ARGS, "--tokens", "8,64,128", "--against", "peer")
    assert answer.code == 1
    assert [(t["tokens"], t["against"]) for t in machine.tasks] == [(8, ["peer"]), (64, ["peer"]), (64, []), (128, [])]
    assert machine.restarts == 1
    assert [len(row["rivals"]) for row in record()["rows"]] == [1, 0, 0] and "peer at 64 tokens: crash" in answer.out


def test_a_peer_that_can_launch_nowhere_is_out_before_the_rows(megamoe, machine) -> None:
    machine.uncompiled = {8: "first launch: barrier timeout", 64: "first launch: barrier timeout"}
    answer = megamoe(*ARGS, "--tokens", "8,64", "--against", "peer")
    assert answer.code == 1 and [t["against"] for t in machine.tasks] == [[], []] and len(record()["failed"]) == 2
    assert "barrier timeout" in answer.err and len(record()["rows"]) == 2
    del machine.uncompiled[64]
    assert megamoe(*ARGS, "--tokens", "8,64", "--against", "peer").code == 0, "one size is only warned of: its row will show"


def test_our_own_failure_is_no_peers(megamoe, machine) -> None:
    """It fails with ours alone too: the peer stays in."""
    machine.answer = lambda task: CaseResult("x", "fault", message="rank 1 gave up waiting") if task["tokens"] == 64 else None
    answer = megamoe(*ARGS, "--tokens", "64,128", "--against", "peer")
    assert answer.code == 1 and [(f["contender"], f["status"]) for f in record()["failed"]] == [("ours", "fault")]
    assert [(t["tokens"], t["against"]) for t in machine.tasks] == [(64, ["peer"]), (64, []), (128, ["peer"])]


def test_a_wrong_peer_is_named_and_stays_in(megamoe, machine) -> None:
    machine.wrong = {"peer": "rank 1: peer: output: peer failed: output wrong (kernel): relative difference 0.5"}
    answer = megamoe(*ARGS, "--tokens", "8,64", "--against", "config:split=m")
    assert answer.code == 1 and [f["reason"] for f in record()["failed"]] == ["output wrong (kernel): relative difference 0.5"] * 2


def test_partial_results_are_kept(megamoe, machine) -> None:
    def stop(task):
        if task["tokens"] == 64:
            raise KeyboardInterrupt

    machine.answer = stop
    answer = megamoe(*ARGS, "--tokens", "8,64,128")
    assert answer.code == 130 and "1 rows on nvlink(2xH200)" in answer.out
    document = record()
    assert len(document["rows"]) == 1 and document["exit_code"] == 130


def test_no_row_begins_when_the_budget_is_spent(megamoe, machine, monkeypatch) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("megamoe_cli.cli.bench_ranks.time", SimpleNamespace(monotonic=lambda: clock.now))
    machine.answer = lambda task: setattr(clock, "now", clock.now + 40.0)
    answer = megamoe(*ARGS, "--tokens", "8,64,128", "--budget", "1m")
    assert answer.code == 6 and "2 rows on nvlink(2xH200), 1 not run" in answer.out
    assert record()["not_run"] == [{"shape": "flash", "tokens": 128, "reason": "no time was left"}]


def test_the_kernels_that_are_built_ahead() -> None:
    from megamoe_cli.cli.bench_cmd import bench_command, requests_of

    found = requests_of(bench_command.make_context("bench", [*ARGS[1:], "--against", "config:split=m"]).params)
    assert [(r.ranks, r.shape.experts, r.config.split) for r in found] == [(2, 256, "auto"), (2, 256, "m")]
