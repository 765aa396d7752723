"""What the client says on the standard input of the agent (``agent.py``): signs of life, wishes, and input for the command.

One byte each: ``.`` alive, ``i`` interrupt, ``t`` stop, ``e`` the input is over; ``d``, eight hex digits (a length in
bytes) and so many bytes are input. The client sends a piece of input for every ``WANTED`` line on our standard error, so
that a command that does not read holds up nothing but its own input. Standard library only; both sides use it.
"""

from __future__ import annotations

import os
import select
import time

WANTED = "far side: input wanted"
ENDED = "far side: ended: "  # what the agent says of a job that did not end by itself: followed by the reason
PIECE = 1 << 18  # bytes of input at a time
_HEAD = 9  # d and the length


def piece(data: bytes) -> bytes:
    """A frame of input."""
    return b"d%08x" % len(data) + data


class Client:
    """``sink``: where the command reads its input, non-blocking; None: it has none. ``heard``: when the client last spoke."""

    def __init__(self, sink: int | None, ask) -> None:
        self.sink, self.ask, self.heard = sink, ask, time.monotonic()
        self.unread, self.owed, self.over = b"", b"", False
        if sink is not None:
            os.set_blocking(sink, False)
            ask()

    def listen(self, seconds: float) -> bytes | None:
        """Waits up to ``seconds``; the wishes that came (``i``, ``t``). None: the client is gone."""
        ready, writable, _ = select.select([0], [self.sink] if self.owed and self.sink is not None else [], [], seconds)
        if writable:
            self._pass_on()
        if not ready:
            return b""
        data = os.read(0, PIECE)
        self.heard = time.monotonic()
        if not data:
            return None
        self.unread += data
        return self._take()

    def _take(self) -> bytes:
        wishes = b""
        while self.unread:
            what = self.unread[:1]
            if what == b"d":
                if len(self.unread) < _HEAD:
                    break
                end = _HEAD + int(self.unread[1:_HEAD], 16)
                if len(self.unread) < end:
                    break
                self.owed += self.unread[_HEAD:end]
                self.unread = self.unread[end:]
                continue
            if what == b"e":
                self.over = True
            elif what in b"it":
                wishes += what
            self.unread = self.unread[1:]
        self._pass_on()
        return wishes

    def _pass_on(self) -> None:
        if self.sink is None:
            return
        had = bool(self.owed)
        try:
            while self.owed:
                self.owed = self.owed[os.write(self.sink, self.owed):]
        except BlockingIOError:
            return
        except OSError:  # the command closed it, or is gone
            self.close()
            return
        if self.over:
            self.close()
        elif had:
            self.ask()

    def close(self) -> None:
        if self.sink is not None:
            os.close(self.sink)
        self.sink, self.owed = None, b""
