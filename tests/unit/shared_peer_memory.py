"""Peer memory for rank processes without a GPU: POSIX shared memory, mapped at another address in each process."""

import ctypes
import os
import uuid
from multiprocessing import resource_tracker, shared_memory

from megamoe_cli import errors


PREFIX = os.environ.get("FAKE_BLOCKS", "megamoe-test-")  # tells one test's blocks from another's


class SharedMemory:
    """``fail_at``: the step ("allocate" or "map") in which this rank fails."""

    name = "POSIX shared memory"

    def __init__(self, fail_at=""):
        self.fail_at, self.own, self.kept = fail_at, [], []

    def check(self, step):
        if step == self.fail_at:
            raise errors.EnvironmentUnfit(f"injected at {step}", hint="none")

    def allocate(self, control, nbytes, name):
        import torch

        def create():
            self.check("allocate")
            self.own.append(shared_memory.SharedMemory(f"{PREFIX}{uuid.uuid4().hex[:12]}", create=True, size=nbytes))
            return self.own[-1].name

        try:
            names = control.agree(f"allocate {name}", create)
        except errors.MegamoeError:
            self.close()
            raise
        mine = self.own[-1]

        def open_all():
            self.check("map")
            blocks = []
            for rank, block_name in enumerate(names):
                if rank == control.rank:
                    blocks.append(mine)
                else:
                    blocks.append(shared_memory.SharedMemory(name=block_name))
                    resource_tracker.unregister(blocks[-1]._name, "shared_memory")  # the owner unlinks it
                    self.kept.append(blocks[-1])
            return blocks

        try:
            blocks = control.step(f"map {name}", open_all)
        except errors.MegamoeError:
            self.close()
            raise
        tensor = torch.frombuffer(mine.buf, dtype=torch.uint8)[:nbytes]
        return tensor, [ctypes.addressof(ctypes.c_char.from_buffer(b.buf)) for b in blocks]

    def close(self):
        """The owner unlinks; mappings stay until the process ends (tensors may still look at them)."""
        for block in self.own:
            block.unlink()
        self.own.clear()
