"""The server's end of the socket to its engine, on which the event loop never waits.

An engine that hangs may leave half a message unread, or unwritten. So messages are sent by a
thread, which may wait as long as it likes, and what arrives is collected until whole messages are
there. The framing is that of `multiprocessing.Connection`, which the engine's end is.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import socket
import struct
import threading
from multiprocessing.connection import Connection
from typing import Any

LARGEST_READ = 1 << 20  # bytes
SHORT = struct.Struct("!i")  # how long a message is
LONG = struct.Struct("!iQ")  # the same for more than 2 GB, after a length of -1


class EnginePipe:
    def __init__(self, connection: Connection):
        self.socket = socket.socket(fileno=os.dup(connection.fileno()))
        self.outgoing: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.incoming = bytearray()
        threading.Thread(
            target=self._send_all, args=(connection,), daemon=True, name="flyweight-to-engine"
        ).start()

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, command: Any) -> None:
        """Returns at once. To an engine that has died nothing is sent; whoever reads finds out."""
        self.outgoing.put(command)

    def read(self) -> list[Any]:
        """The messages that have arrived whole; EOFError when the engine is gone."""
        with contextlib.suppress(BlockingIOError):
            part = self.socket.recv(LARGEST_READ, socket.MSG_DONTWAIT)
            if not part:
                raise EOFError
            self.incoming += part
        messages = []
        while (whole := self._first_message()) is not None:
            # from the process that we have started, and nobody else
            messages.append(pickle.loads(whole))
        return messages

    def close(self) -> None:
        with contextlib.suppress(OSError):  # ends a send that waits, and tells the engine
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
        self.outgoing.put(None)

    def _first_message(self) -> bytes | None:
        if len(self.incoming) < SHORT.size:
            return None
        header = SHORT.size
        (length,) = SHORT.unpack_from(self.incoming)
        if length == -1:
            if len(self.incoming) < LONG.size:
                return None
            header = LONG.size
            _, length = LONG.unpack_from(self.incoming)
        if len(self.incoming) < header + length:
            return None
        whole = bytes(self.incoming[header : header + length])
        del self.incoming[: header + length]
        return whole

    def _send_all(self, connection: Connection) -> None:
        with connection:
            while (command := self.outgoing.get()) is not None:
                try:
                    connection.send(command)
                except OSError:
                    return
