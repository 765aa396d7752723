"""One rank of a group without devices: gloo control plane, POSIX shared memory as the peers' memory.

argv: rank, ranks, rendezvous, what to do, rank that misbehaves. Each rank prints one JSON line to FAKE_OUT.<rank>.
"""

import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path

from megamoe_cli import errors, rank_group
from megamoe_cli.backends.control import Control
from megamoe_cli.processes import die_with_parent

sys.path.insert(0, str(Path(__file__).parent))
from shared_peer_memory import SharedMemory  # noqa: E402


def exchange(control, fail_at=""):
    """Every rank writes its number into byte `rank` of every peer's memory, through the mapped addresses."""
    memory = SharedMemory(fail_at)
    tensor, addresses = memory.allocate(control, 4096, "buffer")
    control.barrier(30)
    for address in addresses:
        ctypes.memset(address + control.rank, 100 + control.rank, 1)
    control.barrier(30)
    seen = tensor[: control.ranks].tolist()
    control.barrier(30)
    memory.close()
    return seen


def main():
    rank, ranks, rendezvous, what, bad = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5])
    die_with_parent()
    mine = rank == bad
    out = {"rank": rank, "pid": os.getpid()}
    try:
        if what == "no-show" and mine:
            time.sleep(300)
        control = Control.bootstrap(rank, ranks, rendezvous, timeout_s=3 if what == "no-show" else 60)
        if what.startswith("fail:"):
            out["seen"] = exchange(control, what[5:] if mine else "")
        elif what == "raise":
            control.step("one", lambda: None)
            control.step("two", lambda: 1 / 0 if mine else None)
        elif what == "skip":  # leaves a step that the others meet in again
            def work():
                if mine:
                    raise errors.UsageError("bad input", rule="some-rule")
                return control.step("inner", lambda: 1)
            try:
                control.step("outer", work)
            finally:
                out["broken"] = control.broken
        elif what == "twice":
            second = Control.bootstrap(rank, ranks, rendezvous)
            out["first"], out["second"] = control.gather(rank), second.gather(-rank)
            control.close()
            out["seen"] = exchange(second)
            second.close()
            third = Control.bootstrap(rank, ranks, rendezvous + "-again")
            out["third"] = third.gather(rank)
            third.close()
        elif what == "other-size":
            Control.bootstrap(rank, ranks + 1, rendezvous)
        elif what == "die":
            control.step("ready", lambda: None)
            print(json.dumps(out), file=open(f"{os.environ['FAKE_OUT']}.{rank}", "w"), flush=True)
            if mine:
                os.kill(os.getpid(), signal.SIGKILL)
            control.gather("waiting for everyone")
        elif what == "stuck":
            control.step("ready", lambda: None)
            print(json.dumps(out), file=open(f"{os.environ['FAKE_OUT']}.{rank}", "w"), flush=True)
            if mine:
                os._exit(9)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(300)  # never talks to the others: only the parent can end it
        elif what == "linger":
            control.close()
            if mine:
                time.sleep(300)
        elif what == "rest":
            out["collected"] = control.collect(rank * 10)
            out["broadcast"] = control.broadcast(f"from {rank}", source=ranks - 1)
            group = __import__("torch").distributed.new_group([0, 1], backend="gloo")
            if rank < 2:
                sub = Control.from_group(group)
                out["sub"] = [sub.rank, sub.ranks, sub.gather(rank)]
                sub.close()
            control.barrier(30)
        else:
            out["seen"] = exchange(control)
        code = 0
    except errors.MegamoeError as error:
        out |= {"error": str(error), "type": type(error).__name__, "rule": getattr(error, "rule", None), "hint": error.hint}
        code = rank_group.LOST_PEERS if "lost the other ranks" in str(error) else 0
    with open(f"{os.environ['FAKE_OUT']}.{rank}", "w") as file:
        print(json.dumps(out), file=file)
    sys.stdout.flush()
    os._exit(code)


main()
