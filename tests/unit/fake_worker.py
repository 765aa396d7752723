"""A worker without a device: each case's options say how it misbehaves. Started by the supervisor's tests."""

import json
import os
import signal
import subprocess
import sys
import time


def say(**message):
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def child(ignore_term=False, new_session=False, hold_pipe=False):
    """A grandchild that would outlive the worker; its pid goes to the file named in the environment."""
    code = "import signal,time\n" + ("signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" if ignore_term else "") + "time.sleep(300)"
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=new_session,
                               stdout=None if hold_pipe else subprocess.DEVNULL)
    with open(os.environ["FAKE_PIDS"], "a") as file:
        file.write(f"{process.pid}\n")


def main():
    start = os.environ.get("FAKE_START", "")
    if start == "die":
        sys.exit("no such device")
    if start == "fatal":
        say(fatal={"message": "no SM90 GPU", "hint": "use --backend emulator", "exit_code": 3})
        return
    if start == "silent":
        time.sleep(300)
    with open(os.environ["FAKE_PIDS"], "a") as file:
        file.write(f"{os.getpid()}\n")
    say(hello={"where": "fake(1)"})
    if start == "leave":
        return
    for line in sys.stdin:
        case = json.loads(line)
        todo = case.get("options", {})
        do = todo.get("do", "pass")
        print(f"case {case['id']}: {do}", file=sys.stderr, flush=True)
        if do == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        elif do == "exit":
            print("device lost", file=sys.stderr, flush=True)
            os._exit(7)
        elif do == "hang":
            time.sleep(300)
        elif do == "stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
            child(ignore_term=True)
            time.sleep(300)
        elif do == "grandchild":
            child(new_session=True)
        elif do == "orphan":  # dies, but a grandchild in another session keeps its stdout open
            child(new_session=True, hold_pipe=True)
            os._exit(3)
        elif do == "garbage":
            print("WARNING: something printed to stdout")
            print('{"id": "other", "status": "pass"}')
            print('{"id": "%s", "status": "excellent"}' % case["id"])
            print("[1, 2]")
        elif do == "babble":
            while True:
                print("x" * 1000)
        elif do == "endless":
            print("x" * (1 << 20), end="", flush=True)
            time.sleep(300)
        elif do == "slow":
            time.sleep(todo["seconds"])
        elif do == "compile":
            say(id=case["id"], stage="compile")
            time.sleep(todo["seconds"])
            say(id=case["id"], stage="run")
            time.sleep(todo.get("run", 0))
        elif do == "stage":
            say(id=case["id"], stage=todo["stage"])
            time.sleep(todo["seconds"])
        elif do == "respawn":
            say(id=case["id"], status="fault", respawn=True)
            time.sleep(300)
        say(id=case["id"], status=todo.get("status", "pass"), seconds=0.1, metrics={"pid": os.getpid(), "big": "y" * todo.get("big", 0)})


main()
