"""One process per rank on real GPUs: two processes sharing one GPU anywhere, a GPU per rank where there are several."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.proving import describe, plan, prove, run

pytestmark = [pytest.mark.gpu, pytest.mark.all_gpus, pytest.mark.timeout(600)]


def gpus() -> int:
    from megamoe_cli.backends.driver import visible_gpus

    return sum(gpu.is_sm90 for gpu in visible_gpus())


@pytest.mark.parametrize("memory", ["symmetric", "ipc"])
def test_two_processes(memory: str) -> None:
    """On one GPU they take turns; the memory, its mapping and the flags are those of the real thing."""
    cases = plan("processes", ranks=2, phase="all", shape="256x256x8x2", tokens="uneven:40", options={"peer_memory": memory})
    results = run(cases, timeout_s=180)
    assert not [r for r in results if not r.passed], "\n".join(describe(r) for r in results)
    expected = "processes(2 on 1x" if gpus() == 1 else "nvlink(2x"
    assert all(r.where.startswith(expected) for r in results), [r.where for r in results]


def test_a_rank_that_dies_is_named_and_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    import signal
    import threading
    import time
    import uuid

    from megamoe_cli.processes import TOKEN, token_pids
    from megamoe_cli.supervisor import run_cases

    mark = uuid.uuid4().hex
    monkeypatch.setenv(TOKEN, mark)

    (case,) = plan("processes", ranks=2, phase="combine", tokens="8", repeat=3)

    def kill_rank_1(case_id: str, stage: str) -> None:
        if stage == "upload":
            threading.Timer(0.2, lambda: [os.kill(p, signal.SIGKILL) for p in token_pids(mark) if b"--rank\x001\x00" in
                                          Path(f"/proc/{p}/cmdline").read_bytes()]).start()  # fmt: skip

    began = time.monotonic()
    (result,) = run_cases([case.to_dict() | {"launches": 400}], backend="processes", ranks=2, timeout_s=120, on_stage=kill_rank_1)
    assert result.status == "crash" and any("rank 1 died with SIGKILL" in line for line in result.stderr), describe(result)
    assert time.monotonic() - began < 100 and token_pids(mark) == []


def test_nvlink_is_not_pretended_on_one_gpu() -> None:
    if gpus() != 1:
        pytest.skip("more than one GPU here")
    done = subprocess.run([sys.executable, "-m", "megamoe_cli", "test", "--backend", "nvlink", "--ranks", "2"], capture_output=True, text=True)
    assert done.returncode == 3 and "one rank per GPU" in done.stderr and "virtual" in done.stderr


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_gpu_per_rank(ranks: int) -> None:
    if gpus() < ranks:
        pytest.skip(f"{gpus()} SM90 GPU(s) here")
    results = prove("nvlink", ranks=ranks, phase="all", tokens="0,uneven:192", timeout_s=240)
    assert all(r.where.startswith(f"nvlink({ranks}x") for r in results)
    prove("nvlink", ranks=ranks, phase="combine", shape="flash", tokens="uneven:512", routing="powerlaw", timeout_s=300)


API = textwrap.dedent("""
    import sys, torch, torch.distributed as dist
    from megamoe_cli.api import fp8_mega_moe, get_symm_buffer_for_sm90_mega_moe, transform_weights_for_mega_moe_sm90
    from megamoe_cli.inputs import make_case
    from megamoe_cli.oracle import gpu_reference
    from megamoe_cli.shapes import Problem, Shape

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(rank % torch.cuda.device_count())
    problem = Problem.make(Shape(256, 1024, 8, 2), ranks, 24)
    buf = get_symm_buffer_for_sm90_mega_moe(dist.group.WORLD, 8, problem.capacity, 2, 256, 1024)
    cases = [make_case(problem, seed=5, launch=n) for n in range(3)]
    w = cases[0].weights[rank]
    l1, l2 = transform_weights_for_mega_moe_sm90((w.w13.cuda(), w.w13_sf.cuda()), (w.w2.cuda(), w.w2_sf.cuda()))
    y = torch.empty(24, 256, dtype=torch.bfloat16, device="cuda")

    def fill(n):
        data = cases[n].inputs[rank]
        for name in ("x", "x_sf", "topk_idx", "topk_weights"):
            view = getattr(buf, name)[:24]
            view.view(torch.uint8).copy_(getattr(data, name).view(torch.uint8))

    def check(n, what):
        torch.cuda.synchronize()
        buf.check()
        want = gpu_reference.layer(cases[n], "cuda")[rank].float()
        error = float((y.float() - want).norm() / want.norm())
        assert error < 1e-2, f"{what} {n} on rank {rank}: {error}"

    dist.barrier()
    fill(0); fp8_mega_moe(y, l1, l2, buf); check(0, "call")
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=side):
        fp8_mega_moe(y, l1, l2, buf)
    for n in (1, 2):
        dist.barrier()
        fill(n); y.fill_(float("nan")); torch.cuda.synchronize(); dist.barrier()
        graph.replay(); check(n, "graph")
    dist.barrier()
    sys.stdout.write(f"API {rank} ok\\n")   # one write: two processes share the pipe
    sys.stdout.flush()
    dist.destroy_process_group()
""")


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_host_api_under_torchrun_and_in_a_cuda_graph(ranks: int, tmp_path: Path) -> None:
    script = tmp_path / "api_run.py"
    script.write_text(API)
    env = dict(os.environ, PYTHONPATH=str(Path(__file__).resolve().parents[2]), GLOO_SOCKET_IFNAME="lo")
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--rdzv-backend", "c10d",
                           "--rdzv-endpoint", "127.0.0.1:0", str(script)], env=env, capture_output=True, text=True, timeout=400)  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert sorted(line for line in done.stdout.splitlines() if line.startswith("API")) == [f"API {r} ok" for r in range(ranks)]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_thousand_launches_with_random_skew(ranks: int) -> None:
    """Ranks on GPUs of their own, each held up before each launch at random: no hang, no other bit."""
    if gpus() < ranks:
        pytest.skip(f"{gpus()} SM90 GPU(s) here")
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--rdzv-backend", "c10d",
                           "--rdzv-endpoint", "127.0.0.1:0", str(root / "tests/gpu/soak_ranks.py"), "1000"],
                          env=dict(os.environ, PYTHONPATH=str(root), GLOO_SOCKET_IFNAME="lo"), capture_output=True, text=True, timeout=300)  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    said = sorted(line.split()[:3] for line in done.stdout.splitlines() if line.startswith("SOAK"))
    assert said == [["SOAK", str(rank), "1000"] for rank in range(ranks)]
