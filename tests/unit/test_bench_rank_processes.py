"""``bench --ranks`` with a process for each rank and the model of the kernel in place of a GPU: parent, group, ranks and control
plane are the real ones. Whatever a rank or another contender does, the parent says it and leaves no process."""

from __future__ import annotations

import os
import sys
import uuid
from pathlib import Path

import pytest

from megamoe_cli.bench.over_ranks import OverRanks, RowRequest
from megamoe_cli.bench.peer_ranks import compile_peer
from megamoe_cli.config import KernelConfig
from megamoe_cli.errors import EnvironmentUnfit
from megamoe_cli.processes import TOKEN, token_pids
from megamoe_cli.shapes import Shape
from megamoe_cli.tuning.schema import Choice

FAKE = Path(__file__).with_name("fake_ranks.py")


@pytest.fixture
def go(tmp_path, monkeypatch):
    """``go(against, tokens, ours=..., peer=...)`` -> (rows, OverRanks); afterwards nothing that it started is alive."""
    mark = f"megamoe-test-{os.getpid()}-{uuid.uuid4().hex[:8]}-"
    monkeypatch.setenv(TOKEN, mark)
    for name, value in (("FAKE_BLOCKS", mark), ("TMPDIR", str(tmp_path)), ("OMP_NUM_THREADS", "1")):
        monkeypatch.setenv(name, value)

    def run(against=(), tokens=(3,), ours="", peer="", start=1, row_s=30.0, setup_s=60.0, say=lambda text: None):
        for name, value in (("FAKE_FAULT", ours), ("FAKE_PEER", peer), ("FAKE_PEER_FROM", str(start))):
            monkeypatch.setenv(name, value)
        command = [sys.executable, str(FAKE), "--backend", "nvlink", "--ranks", "2"]
        with OverRanks(command, list(against), say, log_dir=tmp_path / "logs", row_s=row_s, setup_s=setup_s) as group:
            rows = [group.row(RowRequest("small", Shape(128, 128, 4, 2), 2, n, Choice(KernelConfig()), 3, 1)) for n in tokens]
            return rows, group

    yield run
    assert token_pids(mark) == [], "a rank is left"
    for block in Path("/dev/shm").glob(f"{mark}*"):
        block.unlink(missing_ok=True)


def test_a_row_over_two_processes(go) -> None:
    (row,), group = go(["peer"])
    assert not group.failed and row["where"] == "nvlink(2xmodel)"
    assert (row["kernel_us"], row["back_to_back_us"], row["graph_us"]) == (110.0, 110.0, 110.0) and row["samples"] == 3
    assert row["per_rank_us"] == [100.0, 110.0] and row["slowest_rank"] == 1 and row["times"]["graph"]["per_rank_us"] == [100.0, 110.0]
    assert row["link"]["is_link"] and row["link"]["in_gb_s"] == pytest.approx(row["link"]["in_bytes"] / 110.0 / 1e3) and row["link_floor_us"] > 0
    (rival,) = row["rivals"]
    assert rival["ratios"]["kernel"]["median"] == pytest.approx(0.5) and rival["per_rank_us"] == [200.0, 220.0] and rival["version"] == "9.9"


@pytest.mark.parametrize("peer", ["", "load:1"])
def test_the_peers_kernels_are_compiled_ahead(go, peer, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("FAKE_PEER", peer)
    command = [sys.executable, str(FAKE), "--backend", "nvlink", "--ranks", "2"]
    rows = [RowRequest("small", Shape(128, 128, 4, 2), 2, n, Choice(KernelConfig()), 3, 1) for n in (3, 200)][: 1 if peer else 2]
    failed = compile_peer(command, rows, lambda text: None, log_dir=tmp_path / "logs", limit_s=60.0)
    assert failed == ({3: "loading: the public package does not load here: ImportError: planted"} if peer else {})


def test_an_interrupt_leaves_no_process(go) -> None:
    """The fixture looks for them."""

    def interrupt(text: str) -> None:
        if text == "run":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        go((), ours="hang:1", say=interrupt)


@pytest.mark.long
def test_the_peers_wrong_output_costs_its_column_alone(go) -> None:
    (row,), group = go(["peer"], peer="wrong:1")
    (failed,) = group.failed
    assert row["kernel_us"] == 110.0 and row["rivals"] == [] and group.group.starts == 1
    assert failed["contender"] == "peer" and failed["reason"].startswith("output wrong (first launch)")


# Half a minute each on 2 cores, and the test command has 15 minutes: of the ways a peer can fail one runs always, the others on demand.
@pytest.mark.slow
@pytest.mark.parametrize(("peer", "reason"), [
    pytest.param("load:1", "does not load here: ImportError", marks=pytest.mark.long), pytest.param("rendezvous:0", "rendezvous: planted", marks=pytest.mark.long),
    pytest.param("raise:1", "CUDA error: planted", marks=pytest.mark.long), ("die:1", "rank 1 died with SIGKILL"),
    pytest.param("hang:1", "no answer within 12 s during compile peer", marks=pytest.mark.long)])
def test_what_the_peer_does_wrong_costs_its_column(go, peer, reason) -> None:
    """Whichever rank it happens on; and where it took the group down, later rows go on without it."""
    (first, second), group = go(["peer"], (3, 4), peer=peer, start=4, setup_s=12.0 if peer.startswith("hang") else 60.0)
    if not peer.startswith("load"):
        assert first["rivals"] and second["rivals"] == []
    assert first["kernel_us"] == second["kernel_us"] == 110.0
    (failed,) = group.failed
    assert failed["contender"] == "peer" and reason in failed["reason"], failed
    assert failed["tokens"] == (3 if peer.startswith("load") else 4)


@pytest.mark.slow
@pytest.mark.parametrize(("ours", "status", "reason"), [
    ("raise:1", "error", "CUDA error: planted"), ("die:0", "crash", "rank 0 died with SIGKILL"), ("hang:1", "hang", "no answer within 6 s"),
    ("wrong:1", "fail", "ours is wrong before timing: rank 1, token 0")])
def test_our_own_failure_costs_the_row_and_ends(go, ours, status, reason) -> None:
    (row,), group = go((), ours=ours, row_s=6.0)
    (failed,) = group.failed
    assert row is None and (failed["contender"], failed["status"]) == ("ours", status) and reason in failed["reason"], failed


@pytest.mark.slow
def test_rows_that_no_group_survives_end_the_run(go) -> None:
    with pytest.raises(EnvironmentUnfit, match="2 rows in a row ended their processes"):
        go((), (3, 4, 5), ours="die:1")
