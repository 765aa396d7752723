"""The real worker, rank group, runner and NvlinkBackend, with the model of the kernel in place of a GPU: what a
multi-process run is but for CUDA. Takes the worker's own arguments; FAKE_FAULT="what:rank" misbehaves there.
"""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parent))
import model_kernel  # noqa: E402
from shared_peer_memory import SharedMemory  # noqa: E402

from megamoe_cli import abi, errors, worker  # noqa: E402
from megamoe_cli.backends import topology  # noqa: E402
from megamoe_cli.backends.nvlink import NvlinkBackend  # noqa: E402
from megamoe_cli.runner import Runner  # noqa: E402

WHAT, _, BAD = os.environ.get("FAKE_FAULT", "").partition(":")


class FakeCuda:
    """Memory is the CPU's; a launch runs the model at once, and the model's barriers are the control plane's."""

    def __init__(self, control, bad):
        self.gpu = SimpleNamespace(sms=4, name="model")
        self.control, self.bad, self.kept, self.broken, self.closed = control, bad, [], "", False

    def alloc(self, nbytes):
        import torch

        return torch.zeros(nbytes, dtype=torch.uint8)

    def alloc_pinned(self, nbytes):
        self.kept.append(ctypes.create_string_buffer(nbytes))
        return ctypes.addressof(self.kept[-1])

    def is_here(self, tensor):
        return True

    def stream(self):
        return "stream"

    event = stream

    def record(self, event, stream):
        pass

    def elapsed_ms(self, start, stop):
        return 0.25

    def copy(self, dst, src, nbytes, stream):
        ctypes.memmove(dst, src, nbytes)

    def fill(self, dst, byte, nbytes, stream):
        ctypes.memset(dst, byte, nbytes)

    def encode_tensor_map(self, address, rows, cols, box_rows, box_cols):
        return abi.pack_tensor_map_image(address, rows, cols, cols, box_rows, box_cols)

    def launch(self, handle, grid, threads, blob, smem, stream):
        params = abi.KernelParams.from_buffer_copy(blob)
        params.reserved[0] = grid
        if self.bad and WHAT == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if WHAT in ("trap", "hang", "soft"):
            if self.bad:
                record = abi.FaultRecord(code=1, wait=2, rank=params.rank, index=0, observed=0, expected=1, waited_ns=5 * 10**9)
                ctypes.memmove(params.fault, bytes(record), abi.FAULT_BYTES)
                self.broken = WHAT
            return
        for _ in model_kernel.launch(params, *handle):
            self.control.barrier(60)

    def is_done(self, stream):
        if self.broken == "trap":
            raise RuntimeError("unspecified launch failure")
        return self.broken != "hang"

    def synchronize(self):
        pass

    def close(self):
        self.closed = True


class ModelNvlink(NvlinkBackend):
    def load(self, config, phase, shape):
        if WHAT == "build" and self.rank == int(BAD):
            raise errors.BuildFailed("no such instruction")
        kernel = model_kernel.built_kernel(config, phase, shape, self.ranks)
        kernel.handle = (phase, kernel.config.block_m)
        return kernel


def make_runner(args, control, on_stage):
    bad = BAD != "" and control.rank == int(BAD)
    if WHAT == "gpu" and bad:
        raise errors.EnvironmentUnfit("no SM90 GPU is visible", hint="use --backend emulator")

    def opener(ranks):
        host = "elsewhere" if WHAT == "host" and bad else "here"
        seat = topology.Seat(host, f"GPU-{control.rank}", "model", 0, (9, 0), 4)
        place = topology.judge(control.agree("look", lambda: seat), False)
        memory = SharedMemory("map" if WHAT == "map" and bad else "")
        return ModelNvlink(control, FakeCuda(control, bad), memory, place)

    if WHAT == "slow" and bad:
        time.sleep(2)
    return Runner(args.backend, args.ranks, control=control, opener=opener, on_stage=on_stage, device="cpu")


if __name__ == "__main__":
    sys.exit(worker.main(make_runner=make_runner, program=[sys.executable, __file__]))
