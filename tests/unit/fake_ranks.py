"""The measuring processes of ``megamoe bench --ranks`` with the model of the kernel in place of a GPU: real worker, rank
group, control plane, NvlinkBackend, runner and contenders; a clock for the device. Takes the worker's own arguments.

FAKE_FAULT="what:rank" misbehaves there (what: hang, die, raise in our launch; wrong: our output); FAKE_PEER does so in the
peer's (load, rendezvous, hang, die, raise, wrong). FAKE_PEER_FROM: from which token count on.
"""

import os
import signal
import sys
import time
from contextlib import nullcontext
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
from fake_nvlink import FakeCuda, ModelNvlink  # noqa: E402
from shared_peer_memory import SharedMemory  # noqa: E402

from megamoe_cli import errors  # noqa: E402
from megamoe_cli.backends import topology  # noqa: E402
from megamoe_cli.bench import ranks_worker  # noqa: E402
from megamoe_cli.bench.contender import Contender  # noqa: E402
from megamoe_cli.bench.rank_devices import StreamDevice  # noqa: E402

OURS, PEER = (os.environ.get(name, "").partition(":")[::2] for name in ("FAKE_FAULT", "FAKE_PEER"))


def misbehave(what):
    if what == "hang":
        time.sleep(3600)
    elif what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "raise":
        raise RuntimeError("CUDA error: planted")


class Clock:
    """A device on which a launch of ours takes 100 us on rank 0 and 10 more on each other one; the peer's twice as long."""

    def __init__(self, rank):
        self.rank, self.us, self.capturing = rank, 0.0, None

    def launch(self, factor=1.0):
        self.us += factor * (100.0 + 10.0 * self.rank)

    def do(self, work):
        if self.capturing is not None:
            self.capturing.append(work)
        else:
            work()

    def using(self):
        return nullcontext()

    def busy(self, us):
        pass

    def mark(self):
        return self.us

    def between_us(self, start, stop):
        return stop - start or 0.5

    def wait(self, timeout_s):
        pass

    def capture(self, enqueue):
        self.capturing, kept = [], []
        enqueue()
        kept, self.capturing = self.capturing, None
        return lambda: [work() for work in kept]

    def now_s(self):
        return 0.0


class RankNvlink(ModelNvlink):
    clock = None

    def enqueue(self, rank, kernel, params, grid):
        self._usable()

        def work():
            mine = OURS[1] == str(self.rank)
            if mine and OURS[0] in ("hang", "die"):
                misbehave(OURS[0])
            self._launch(kernel, params.pack(), grid, None)
            if mine and OURS[0] == "raise":  # after the model's barriers, which are the control plane's
                misbehave(OURS[0])
            if mine and OURS[0] == "wrong":
                import ctypes

                ctypes.memset(params.y, 0xFF, 2)
            self.clock.launch()

        self.clock.do(work)


class FakePeer(Contender):
    """Knows the answer: the reference of the inputs it was given."""

    name, version = "peer", "9.9"

    def __init__(self, runner, rank, ranks):
        self.runner, self.rank, self.bad = runner, rank, ""
        if PEER == ("load", str(rank)):
            raise errors.EnvironmentUnfit("the public package does not load here: ImportError: planted")

    def load_layers(self, weights):
        pass

    def use_layers(self, l1, l2):
        assert l1[0].shape[1] == 2 * l2[0].shape[2]

    def meet(self, problem, device):
        self.bad, self.arena = PEER[0] if PEER[1] == str(self.rank) else "", None

    def prepare(self, problem, weights):
        import torch

        self.bad = PEER[0] if PEER[1] == str(self.rank) and problem.tokens[0] >= int(os.environ.get("FAKE_PEER_FROM", "1")) else ""
        if self.bad == "rendezvous":
            raise RuntimeError("rendezvous: planted")
        (self.arena,) = [arena for arena in self.runner._arenas.values() if arena.problem == problem]
        self.y = torch.empty(problem.tokens[self.rank], problem.shape.hidden, dtype=torch.bfloat16)

    def load(self, inputs):
        if self.arena is None:
            assert inputs[self.rank]["topk_idx"].max() > 1
            return
        case = next(n for n, own in enumerate(self.arena.inputs) if own is inputs)
        self.answer = self.runner._reference(self.arena, case)[self.rank]

    def enqueue(self):
        def work():
            misbehave(self.bad)
            if self.arena is None:
                return
            self.y.copy_(self.answer * (2.0 if self.bad == "wrong" else 1.0))
            self.runner.backend.clock.launch(2.0)

        self.runner.backend.clock.do(work)

    def output(self):
        return self.y


def runner(options, control, on_stage, reserve_sms):
    from megamoe_cli.bench.ranks_runner import RanksRunner

    def opener(ranks, **more):
        seat = topology.Seat("here", f"GPU-{control.rank}", "model", 0, (9, 0), 4)
        place = topology.judge(control.agree("look", lambda: seat), False)
        backend = RankNvlink(control, FakeCuda(control, False), SharedMemory(""), place, None, reserve_sms)
        backend.clock = Clock(control.rank)
        return backend

    made = RanksRunner("nvlink", options.ranks, control=control, on_stage=on_stage, opener=opener, device="cpu",
                       make_device=lambda backend, control: StreamDevice(backend, control, backend.clock),
                       open_peer=lambda rank, ranks: FakePeer(made, rank, ranks))  # fmt: skip
    return made


if __name__ == "__main__":
    sys.exit(ranks_worker.main(runner=runner, program=[sys.executable, __file__]))
