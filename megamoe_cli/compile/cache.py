"""A content-addressed store of build products that many processes may use at once.

An entry is two files, ``<key><suffix>`` and ``<key>.json``. The manifest holds size and SHA-256 of the
binary and is written last; an entry that is missing, truncated, altered or unreadable is a miss. Keys
hold no paths, so a cache may be copied to another machine or checkout.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megamoe_cli.compile.child import check_stop
from megamoe_cli.errors import CACHE_HINT, EnvironmentUnfit, TimedOut
from megamoe_cli.paths import cache_dir

SCHEMA = "megamoe.build/1"
_STALE_S = 24 * 3600


@dataclass(frozen=True)
class Entry:
    """``path`` of the verified binary; ``manifest`` as written by who built it; ``hit``: nothing was built."""

    path: Path
    manifest: dict[str, Any]
    hit: bool


def key_of(**parts: Any) -> str:
    """40 hex digits over named parts (JSON values); everything that can change the product belongs here."""
    text = json.dumps({"schema": SCHEMA, **parts}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:40]


class BuildCache:
    """``root``: folder, created when first written to (default: ``builds`` in the user's cache)."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = root or cache_dir() / "builds"

    def get(self, key: str, suffix: str) -> Entry | None:
        """A verified entry, or None."""
        path = self.root / (key + suffix)
        try:
            manifest = json.loads((self.root / f"{key}.json").read_bytes())
            data = path.read_bytes()
            whole = len(data) == manifest["size"] and hashlib.sha256(data).hexdigest() == manifest["sha256"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return Entry(path, manifest, hit=True) if whole and manifest.get("schema") == SCHEMA else None

    def get_or_build(self, key: str, suffix: str, produce: Callable[[], tuple[bytes, dict[str, Any]]], *,
                     force: bool = False, lock_timeout_s: float = 600) -> Entry:
        """The entry, built by ``produce`` (binary, facts for the manifest) when it is not there.

        Processes that want one key at once build it once: the others wait for the lock and then hit.
        EnvironmentUnfit when the folder cannot be written; TimedOut when the lock is held for too long.
        """
        found = None if force else self.get(key, suffix)
        if found is None:
            found = self._build(key, suffix, produce, force, lock_timeout_s)
        self._count("hits" if found.hit else "misses")
        return found

    def _build(self, key: str, suffix: str, produce: Callable[[], tuple[bytes, dict[str, Any]]], force: bool,
               lock_timeout_s: float) -> Entry:
        asked = time.time_ns()
        with self._locked(key, lock_timeout_s):
            found = self.get(key, suffix)
            # With force, a product finished while this process waited for the lock is as new as asked for.
            if found is not None and (not force or found.manifest.get("written_ns", 0) > asked):
                return found
            data, facts = produce()
            manifest = {"schema": SCHEMA, "key": key, **facts, "size": len(data),
                        "sha256": hashlib.sha256(data).hexdigest(), "written_ns": time.time_ns()}
            try:
                self._drop_stale()
                self._write(self.root / (key + suffix), data)
                self._write(self.root / f"{key}.json", json.dumps(manifest, indent=1).encode())
            except OSError as error:
                raise self._unwritable(error) from None
            return Entry(self.root / (key + suffix), manifest, hit=False)

    @contextmanager
    def _locked(self, key: str, timeout_s: float) -> Iterator[None]:
        """Holds the key's lock file. Waits in short steps, so that an interrupted build does not wait for others."""
        from filelock import FileLock, Timeout

        lock = FileLock(str(self.root / f"{key}.lock"))
        deadline = time.monotonic() + timeout_s
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            while not lock.is_locked:
                check_stop()
                try:
                    lock.acquire(timeout=max(0, min(1, deadline - time.monotonic())))
                except Timeout:
                    if time.monotonic() >= deadline:
                        raise TimedOut(f"another process has been building {key[:12]} for more than {timeout_s:g} s "
                                       f"({lock.lock_file})") from None
        except OSError as error:
            raise self._unwritable(error) from None
        try:
            yield
        finally:
            lock.release()

    def _write(self, path: Path, data: bytes) -> None:
        """Readers see the old file or the new one, never a part; the bytes are on disk before the name is."""
        handle, temporary = tempfile.mkstemp(prefix=".tmp-", dir=self.root)
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise

    def _drop_stale(self) -> None:
        """Temporaries of processes that were killed a day ago or more."""
        for path in self.root.glob(".tmp-*"):
            try:
                if time.time() - path.stat().st_mtime > _STALE_S:
                    path.unlink()
            except OSError:
                continue  # someone else removed it

    def _count(self, what: str) -> None:
        """One byte per event: appends are atomic, the size is the count. Statistics only, so failures are ignored."""
        try:
            with open(self.root / what, "ab") as stream:
                stream.write(b".")
        except OSError:
            pass

    def statistics(self) -> dict[str, int]:
        """``entries``, ``bytes``, and ``hits`` and ``misses`` since the folder was made."""
        binaries = [p for p in self.root.glob("*") if p.suffix in (".cubin", ".so")] if self.root.is_dir() else []
        counts = {what: _size(self.root / what) for what in ("hits", "misses")}
        return {"entries": len(binaries), "bytes": sum(map(_size, binaries)), **counts}

    def _unwritable(self, error: OSError) -> EnvironmentUnfit:
        return EnvironmentUnfit(f"the build cache {self.root} cannot be written: {error.strerror or error}",
                                hint=CACHE_HINT)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
