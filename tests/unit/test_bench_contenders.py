"""The contenders on the CPU: the adapter of the public package over a stand-in for it, the chain of separate kernels over
stand-ins for its GEMMs, and what is said about outputs that are wrong."""

from __future__ import annotations

import contextlib
import sys
from types import SimpleNamespace

import pytest
import torch

from megamoe_cli.bench import peer as peer_module
from megamoe_cli.bench import peer_build
from megamoe_cli.bench.contender import ContenderFailed, blame
from megamoe_cli.bench.judge import check_ours, check_rival, difference, reference
from megamoe_cli.bench.peer import Peer
from megamoe_cli.bench.rank_contenders import RankPeer
from megamoe_cli.bench.rivals import open_rivals, parse_names
from megamoe_cli.bench.rows import load_rows
from megamoe_cli.bench.unfused import PeerGemms, TorchGemms, Unfused, quantize, sort_entries
from megamoe_cli.errors import EnvironmentUnfit, UsageError, WrongResult
from megamoe_cli.inputs import make_case, make_weights
from megamoe_cli.oracle.casedata import CaseData, RankInputs, RankWeights
from megamoe_cli.shapes import Problem, Shape
from megamoe_cli.weights import deinterleave_gate_up, interleave_gate_up

SHAPE = Shape(256, 256, 4, 2)
GROUP = SimpleNamespace(size=lambda: 1, rank=lambda: 0)


def case_of(tokens: int, launch: int = 0, weights: RankWeights | None = None) -> CaseData:
    problem = Problem.make(SHAPE, 1, tokens)
    return make_case(problem, seed=5, launch=launch, weights=[weights or make_weights(problem, 0, 5)])


class Package:
    """The package's interface over the FP32 reference: buffers as it makes them, calls as it takes them."""

    __version__ = "9.9"

    def __init__(self) -> None:
        self.transformed, self.buffers, self.bounds = 0, [], []
        self.factor = 1.0

    def get_symm_buffer_for_mega_moe(self, group, experts, capacity, topk, hidden, intermediate):
        assert group is GROUP and capacity % 128 == 0
        rows = capacity + 256  # it rounds up to its own multiple
        made = SimpleNamespace(
            x=torch.empty(rows, hidden, dtype=torch.float8_e4m3fn), x_sf=torch.empty(rows, hidden // 128), destroyed=False,
            topk_idx=torch.empty(rows, topk, dtype=torch.int64), topk_weights=torch.empty(rows, topk), sizes=(experts, topk, hidden, intermediate))
        made.destroy = lambda: setattr(made, "destroyed", True)
        self.buffers.append(made)
        return made

    def transform_weights_for_mega_moe_sm90(self, l1, l2):
        self.transformed += 1
        return (interleave_gate_up(l1[0]), l1[1]), l2

    def fp8_mega_moe(self, y, l1, l2, buffer, cumulative_local_expert_recv_stats=None, recipe=(128, 128, 128), activation="swiglu",
                     activation_clamp=None, fast_math=True):  # fmt: skip
        n, (experts, topk, hidden, intermediate) = len(y), buffer.sizes
        problem = Problem.make(Shape(hidden, intermediate, experts, topk), 1, n)
        weights = RankWeights(deinterleave_gate_up(l1[0]), l1[1], *l2)
        given = RankInputs(*(getattr(buffer, name)[:n] for name in ("x", "x_sf", "topk_idx", "topk_weights")))
        y.copy_(reference(CaseData(problem, [given], [weights])) * self.factor)


class Bounded(Package):
    def fp8_mega_moe(self, y, l1, l2, buffer, cumulative_local_expert_recv_stats=None, num_tokens_bound=None):
        self.bounds.append(num_tokens_bound)
        super().fp8_mega_moe(y, l1, l2, buffer)


def run(contender, case: CaseData) -> torch.Tensor:
    contender.prepare(case.problem, case.weights[0])
    contender.load(case.inputs[0])
    contender.poison()
    contender.launch()
    return contender.output()


def test_the_packages_adapter() -> None:
    package = Package()
    peer = Peer(package, GROUP)
    first = case_of(5)
    assert peer.version == "9.9" and peer.limits == (0.06, 0.12)
    assert check_rival(peer, reference(first), {"kernel": run(peer, first)}) == (0.0, 0.0)
    again = case_of(3, launch=1, weights=first.weights[0])
    assert torch.equal(run(peer, again), reference(again)) and len(peer.output()) == 3
    assert package.transformed == 1 and len(package.buffers) == 1, "weights and a buffer of this capacity are kept"
    larger = case_of(130, weights=first.weights[0])
    assert torch.equal(run(peer, larger), reference(larger))
    assert [b.destroyed for b in package.buffers] == [True, False] and package.transformed == 1
    peer.close(), peer.close()
    assert package.buffers[1].destroyed


def test_a_release_that_asks_for_a_bound_gets_one() -> None:
    package = Bounded()
    run(Peer(package, GROUP), case_of(7))
    assert package.bounds == [7]


def test_one_rank_of_several() -> None:
    """Its own rows and its own group, made once; never with a multicast object."""
    calls: list = []
    handle = SimpleNamespace(multicast_ptr=0)

    class Several:
        __version__ = "9.9"

        def get_symm_buffer_for_mega_moe(self, group, experts, capacity, topk, hidden, intermediate):
            calls.append((group, experts, capacity))
            return SimpleNamespace(x=torch.zeros(capacity, hidden, dtype=torch.float8_e4m3fn), x_sf=torch.zeros(capacity, hidden // 128), handle=handle,
                                   topk_idx=torch.zeros(capacity, topk, dtype=torch.int64), topk_weights=torch.zeros(capacity, topk))  # fmt: skip

        def transform_weights_for_mega_moe_sm90(self, l1, l2):
            return l1, l2

        def fp8_mega_moe(self, y, l1, l2, buffer, num_tokens_bound=None):
            calls.append((len(y), l1[0].shape[0], num_tokens_bound, buffer.topk_idx[: len(y)].tolist()))

    problem = Problem(SHAPE, 2, (3, 5), 128)
    case = make_case(problem, seed=5)
    rival = RankPeer(1, 2, Several(), lambda ranks: ("group", ranks))
    for _ in range(2):
        rival.prepare(problem, case.weights[1])
    rival.load({1: {name: getattr(case.inputs[1], name) for name in ("x", "x_sf", "topk_idx", "topk_weights")}})
    rival.launch()
    assert calls == [(("group", 2), 4, 128), (5, 2, 5, case.inputs[1].topk_idx.tolist())] and rival.output().shape == (5, 256)
    handle.multicast_ptr = 1
    with pytest.raises(EnvironmentUnfit, match="multicast"):
        rival.prepare(Problem(SHAPE, 2, (200, 200), 256), case.weights[1])


def test_wrong_output_is_told_apart_from_other_rounding() -> None:
    case, package = case_of(6), Package()
    peer, want = Peer(package, GROUP), reference(case)
    package.factor = 1.04
    assert check_rival(peer, want, {"kernel": run(peer, case)})[0] == pytest.approx(0.04, abs=0.005)
    package.factor = 1.1
    with pytest.raises(ContenderFailed, match=r"^peer failed: output wrong \(graph\): relative difference 0\.1"):
        check_rival(peer, want, {"graph": run(peer, case)})
    broken = want.clone()
    broken[2] = 0  # one row of six, and no other
    with pytest.raises(ContenderFailed, match="output wrong"):
        check_rival(peer, want, {"cold": broken})
    broken = want.clone()
    broken[1, 3] = torch.nan
    assert difference(broken, want) == (torch.inf, torch.inf)
    with pytest.raises(ContenderFailed, match="output wrong"):
        check_rival(peer, want, {"cold": broken})


def test_a_buffer_of_another_form_is_refused() -> None:
    package = Package()
    make = package.get_symm_buffer_for_mega_moe

    def packed(*args):
        made = make(*args)
        made.x_sf = torch.empty(512, 1, dtype=torch.int32)
        return made

    package.get_symm_buffer_for_mega_moe = packed
    peer = Peer(package, GROUP)
    with pytest.raises(ContenderFailed, match="peer does not take this: its buffer has x_sf"), blame(peer, "load"):
        run(peer, case_of(5))
    with pytest.raises(UsageError, match="2 ranks"):
        peer.prepare(Problem.make(SHAPE, 2, 4), case_of(4).weights[0])


def test_ours_is_judged_by_the_limits_of_test() -> None:
    case = case_of(6)
    want = reference(case)
    assert check_ours(case, {"kernel": want, "cold": want.clone()}) == 0.0
    wrong = want.clone()
    wrong[3] *= 1.5
    with pytest.raises(WrongResult, match=r"\(cold\) is wrong"):
        check_ours(case, {"kernel": want, "cold": wrong})
    one_bit = want.clone()
    one_bit.view(torch.int16)[0, 0] ^= 1
    with pytest.raises(WrongResult, match="differ in some bits"):
        check_ours(case, {"kernel": want, "graph": one_bit})


# -- finding the package ---------------------------------------------------------------------------


def test_not_installed_or_not_it(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setattr(peer_module, "IMPORT_NAME", "a_package_nobody_has")
    with pytest.raises(EnvironmentUnfit, match="not installed here") as caught:
        open_rivals(["peer"], None)
    assert caught.value.exit_code == 3 and "\n" not in str(caught.value) and "0.1.4" in caught.value.hint
    monkeypatch.setattr(peer_module, "IMPORT_NAME", "stand_in_package")
    monkeypatch.syspath_prepend(tmp_path)
    source = tmp_path / "stand_in_package.py"
    source.write_text("raise AssertionError('no CUDA home\\nmore')\n")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.delenv("DG_JIT_USE_NVRTC", raising=False)
    with pytest.raises(EnvironmentUnfit, match="nvcc"):
        peer_module.load_package()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    with pytest.raises(EnvironmentUnfit, match="does not load here: AssertionError: no CUDA home$"):
        peer_module.load_package()
    source.write_text("__version__ = '2.0'\ndef fp8_mega_moe(): pass\n")
    sys.modules.pop("stand_in_package", None)
    with pytest.raises(EnvironmentUnfit, match="has no get_symm_buffer_for_mega_moe"):
        peer_module.load_package()


def test_a_group_of_one_needs_no_network() -> None:
    import torch.distributed as dist

    try:
        group = peer_module.group_of_one()
        group.barrier()
        assert (group.size(), group.rank()) == (1, 0) and peer_module.group_of_one() is group
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.mark.parametrize("text, word", [("peeer", "nearest name: peer"), ("", "takes names"), ("peer,x", "'x'")])
def test_names(text: str, word: str) -> None:
    assert parse_names("unfused, peer,unfused") == ["unfused", "peer"]
    with pytest.raises(UsageError, match=word):
        parse_names(text)


# -- the chain of separate kernels -----------------------------------------------------------------


def grouped_mm(a, b, scale_a, scale_b, offs, out_dtype):
    """What torch's grouped FP8 product is documented to do, in float64."""
    assert b.stride(1) == 1, "the weights must be K-contiguous"
    out, start = torch.empty(a.shape[0], b.shape[2], dtype=out_dtype), 0
    for expert, end in enumerate(offs.tolist()):
        wide = a[start:end].double() * scale_a[start:end, None] @ (b[expert].double() * scale_b[expert])
        out[start:end], start = wide.to(out_dtype), end
    return out


def masked_gemm(a, b, d, masked_m, expected_m):
    """What the package's masked grouped product does: [E,M,K] x [E,N,K], only the first rows of each expert."""
    assert masked_m.dtype == torch.int32 and expected_m >= 1
    d.fill_(torch.nan)
    for expert, count in enumerate(masked_m.tolist()):
        if not count:
            continue
        wide = a[0][expert, :count].double().view(count, -1, 128) * a[1][expert, :count, :, None]
        w = b[0][expert].double().view(b[0].shape[1] // 128, 128, -1, 128) * b[1][expert][:, None, :, None]
        d[expert, :count] = (wide.view(count, -1) @ w.view(b[0].shape[1], -1).T).to(d.dtype)


class Captures:
    """A device whose graphs just call again."""

    waits = captured = 0

    def wait(self, timeout_s: float) -> None:
        self.waits += 1

    def capture(self, enqueue):
        self.captured += 1
        return enqueue

    def using(self):
        return contextlib.nullcontext()


@pytest.mark.parametrize("which", ["torch", "package"])
def test_the_chain_computes_the_layer(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "_scaled_grouped_mm", grouped_mm, raising=False)
    gemms = TorchGemms() if which == "torch" else PeerGemms(SimpleNamespace(fp8_m_grouped_gemm_nt_masked=masked_gemm, __version__="1"))
    device = Captures()
    chain = Unfused("unfused", gemms, device)
    first = case_of(9)
    for case in (first, case_of(9, launch=1, weights=first.weights[0]), case_of(1, launch=2, weights=first.weights[0])):
        found = check_rival(chain, reference(case), {"graph": run(chain, case)})
        assert 0 < found[0] < chain.limits[0] and found[1] < chain.limits[1]
    assert device.captured == 3 and device.waits == 3
    assert found[0] < (0.1 if which == "torch" else 0.04)
    wrong = run(chain, first).clone()
    wrong[0] = wrong[1]
    with pytest.raises(ContenderFailed):
        check_rival(chain, reference(first), {"graph": wrong})


def test_entries_by_expert() -> None:
    entries = sort_entries(torch.tensor([[3, 0], [0, 2], [0, 3]]), 4)
    assert entries.order.tolist() == [1, 2, 4, 3, 0, 5] and entries.ends.tolist() == [3, 3, 4, 6] and entries.ends.dtype == torch.int32
    codes, scales = quantize(torch.tensor([[1.0] * 128 + [-4.0] * 128]), 128)
    assert scales.tolist() == [[pytest.approx(1 / 448), pytest.approx(4 / 448)]] and codes.float().unique().tolist() == [-448, 448]


def test_no_grouped_product_no_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "_scaled_grouped_mm", raising=False)
    with pytest.raises(EnvironmentUnfit, match="no grouped FP8 product"):
        TorchGemms()
    with pytest.raises(EnvironmentUnfit, match="no masked grouped"):
        PeerGemms(SimpleNamespace(__version__="1"))


# -- compiling ahead, and the rows -----------------------------------------------------------------


def test_kernels_are_compiled_in_parallel_and_failures_are_told(tmp_path) -> None:
    program = tmp_path / "stand_in.py"
    program.write_text("import sys, pathlib\n"
                       f"pathlib.Path({str(tmp_path)!r}, 'done-' + sys.argv[1] + '-' + sys.argv[2]).touch()\n"
                       "print('x' * 200000, file=sys.stderr)\n"
                       "sys.exit('no compiler' if sys.argv[2] == '512' else 0)\n")
    said: list[str] = []
    rows = {SHAPE: [1, 2, 4, 512], Shape(256, 256, 8, 2): [256]}
    failed = peer_build.build(rows, said.append, command=(sys.executable, str(program)), processes=2)
    assert sorted(p.name.removeprefix("done-") for p in tmp_path.glob("done-*")) == [
        "256x256x4x2-1,2", "256x256x4x2-4", "256x256x4x2-512", "256x256x8x2-256"]
    assert failed == ["256x256x4x2 at [512]: no compiler"] and "4 groups" in said[0]
    program.write_text("import time\ntime.sleep(60)\n")
    (late,) = peer_build.build({SHAPE: [1]}, said.append, command=(sys.executable, str(program)), timeout_s=0.3)
    assert "not done within 0.3 s" in late


def test_the_rows_and_their_ratios() -> None:
    rows = load_rows()
    assert len(rows.targets) == 38 and rows.rank_of == 8
    assert rows.ratio_to_reach("flash", 1, 8, "0.1.4") == pytest.approx(38 / 64.8) and rows.ratio_to_reach("v3", 8192, 8, "0.1.4") < 0.7
    assert rows.ratio_to_reach("flash", 1, 4, "0.1.4") is None and rows.ratio_to_reach("flash", 3, 8, "0.1.4") is None
    assert rows.ratio_to_reach("flash", 1, 8, "0.3") is None
    assert rows.sizes(["pro"], [8, 16, 64]) == {"pro": [8, 64]}
    assert all(0.4 < rows.ratio_to_reach(*key, 8, "0.1.4") < 0.95 and rows.ratio_to_reach(*key, 8, "0.2.5") <= 0.975 for key in rows.targets)
    with pytest.raises(UsageError, match="no row"):
        rows.sizes(["flash"], [3])
    with pytest.raises(UsageError, match="nearest name: peer"):
        load_rows("pear")
