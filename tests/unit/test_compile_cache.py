"""The build cache: damage is a miss, many processes build once, errors are readable."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from megamoe_cli.compile.cache import BuildCache, key_of
from megamoe_cli.errors import EnvironmentUnfit, TimedOut

DATA = bytes(range(256)) * 40


@pytest.fixture
def cache(tmp_path):
    return BuildCache(tmp_path / "cache")


def build(cache, key="k", data=DATA, **options):
    calls = []

    def produce():
        calls.append(1)
        return data, {"note": "x"}

    entry = cache.get_or_build(key, ".cubin", produce, **options)
    return entry, len(calls)


def test_first_a_miss_then_a_hit(cache):
    entry, calls = build(cache)
    assert (entry.hit, calls) == (False, 1)
    again, calls = build(cache)
    assert (again.hit, calls) == (True, 0)
    assert again.path.read_bytes() == DATA and again.manifest["note"] == "x" and again.manifest["size"] == len(DATA)
    assert cache.statistics() == {"entries": 1, "bytes": len(DATA), "hits": 1, "misses": 1}


@pytest.mark.parametrize("damage", [
    lambda binary, manifest: binary.write_bytes(b""),
    lambda binary, manifest: binary.write_bytes(DATA[:len(DATA) // 2]),
    lambda binary, manifest: binary.write_bytes(DATA[:-1] + b"?"),
    lambda binary, manifest: binary.unlink(),
    lambda binary, manifest: manifest.write_text("{"),
    lambda binary, manifest: manifest.write_text("[]"),
    lambda binary, manifest: manifest.write_text("{}"),
    lambda binary, manifest: manifest.unlink(),
    lambda binary, manifest: manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"schema": "megamoe.build/0"})),
], ids=["empty", "half", "one byte", "gone", "cut json", "not an object", "no fields", "no manifest", "old schema"])
def test_damage_is_a_miss_and_heals(cache, damage):
    entry, _ = build(cache)
    damage(entry.path, cache.root / "k.json")
    healed, calls = build(cache)
    assert (healed.hit, calls) == (False, 1)
    assert build(cache)[1] == 0


def test_an_unreadable_entry_is_a_miss(cache, monkeypatch):
    build(cache)
    real = Path.read_bytes

    def denied(self):
        if self.suffix == ".cubin":
            raise PermissionError(13, "Permission denied", str(self))
        return real(self)

    monkeypatch.setattr(Path, "read_bytes", denied)
    assert cache.get("k", ".cubin") is None


def test_force_builds_again(cache):
    build(cache)
    entry, calls = build(cache, data=b"new", force=True)
    assert (entry.hit, calls) == (False, 1) and entry.path.read_bytes() == b"new"


def test_a_failing_build_leaves_nothing(cache):
    def produce():
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        cache.get_or_build("k", ".cubin", produce)
    assert {p.suffix for p in cache.root.iterdir()} <= {".lock"}
    assert build(cache)[1] == 1


def test_a_folder_that_cannot_be_made_is_the_environment(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentUnfit) as caught:
        build(BuildCache(tmp_path / "file" / "cache"))
    assert str(tmp_path / "file") in str(caught.value) and "MEGAMOE_CACHE_DIR" in caught.value.hint


def test_a_held_lock_is_a_timeout_not_a_hang(cache):
    inside, leave = threading.Event(), threading.Event()

    def slow():
        inside.set()
        leave.wait(30)
        return DATA, {}

    holder = threading.Thread(target=lambda: cache.get_or_build("k", ".cubin", slow))
    holder.start()
    try:
        assert inside.wait(10)
        with pytest.raises(TimedOut, match="another process"):
            build(cache, lock_timeout_s=0.3)
    finally:
        leave.set()
        holder.join(30)
    assert build(cache)[1] == 0


def test_temporaries_of_the_dead_are_removed(cache):
    cache.root.mkdir(parents=True)
    old, fresh = cache.root / ".tmp-old", cache.root / ".tmp-fresh"
    old.write_text("x")
    fresh.write_text("x")
    os.utime(old, (0, 0))
    build(cache)
    assert not old.exists() and fresh.exists()


def test_the_key_depends_on_every_part():
    parts = {"options": ["-a"], "compiler": "c", "text": "t", "sources": "s"}
    keys = {key_of(**parts)} | {key_of(**{**parts, name: "other"}) for name in parts}
    assert len(keys) == 5 and all(len(key) == 40 for key in keys)


_RACE = """
import sys, time
from pathlib import Path
from megamoe_cli.compile.cache import BuildCache
cache, log = BuildCache(Path(sys.argv[1]) / "made" / "together"), Path(sys.argv[1], "log")
def produce():
    with open(log, "a") as stream:
        stream.write("built\\n")
    time.sleep(0.3)
    return b"z" * 100000, {}
print("ready", flush=True)
sys.stdin.readline()
entry = cache.get_or_build("k", ".cubin", produce)
assert entry.path.read_bytes() == b"z" * 100000
print("hit" if entry.hit else "miss")
"""


def test_many_cold_processes_build_once(tmp_path):
    processes = [subprocess.Popen([sys.executable, "-c", _RACE, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
                 for _ in range(12)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    answers = []
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    for process in processes:
        answers.append(process.communicate(timeout=60)[0].strip())
        assert process.returncode == 0
    assert (tmp_path / "log").read_text() == "built\n"
    assert sorted(answers) == ["hit"] * 11 + ["miss"]
