"""Length-prefixed JSON messages over a Unix socket, with a deadline. No pickles: what a child sends
is parsed as data.
"""

from __future__ import annotations

import json
import select
import socket
import struct
import time
from typing import Any

from kernels_eval.config import MESSAGE_BYTES, SEND_S

PREFIX = struct.Struct("!I")
Fds = tuple[int, ...]
"""Descriptors that go along with a message."""
Message = dict[str, object]
"""One record as JSON has it."""
Answer = dict[str, Any]
"""A record that a trusted process has sent, read as what it is meant to be."""


class ChannelClosed(Exception):
    """The other side is gone."""


class ChannelTimeout(Exception):
    """No complete message before the deadline."""


class Channel:
    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        # one that never reads must not hold its sender for ever
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_S, 0))
        self._buffer = bytearray()
        self.accepts_descriptors = False
        self.descriptors: list[int] = []
        """Received with messages from trusted senders (`accepts_descriptors`); others could exhaust
        them.
        """
        self.attached: list[int] = []

    def send(self, message: Message, fds: Fds = ()) -> None:
        data = json.dumps(message, allow_nan=True).encode("utf-8", "surrogatepass")
        data = PREFIX.pack(len(data)) + data
        try:
            sent = socket.send_fds(self.sock, [data], list(fds)) if fds else 0
            self.sock.sendall(data[sent:])
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def pending(self) -> bool:
        """Whether an unread message has arrived. False where the other side is gone."""
        if self._buffer:
            return True
        try:
            return bool(self.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except OSError:
            return False

    def receive(self, timeout: float | None = None) -> object:
        """One message. Raises ChannelTimeout (a partial message stays) or ChannelClosed (EOF,
        nonsense).
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        self._fill(PREFIX.size, deadline)
        size: int = PREFIX.unpack_from(self._buffer)[0]
        if size > MESSAGE_BYTES:
            raise ChannelClosed(f"message of {size} bytes is above the limit")
        end = PREFIX.size + size
        self._fill(end, deadline)
        data = self._buffer[PREFIX.size : end]
        del self._buffer[:end]
        try:
            found: object = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise ChannelClosed(f"not JSON: {str(error)[:200]}") from error
        return found

    def receive_record(self, timeout: float | None = None) -> Answer:
        """One record, from a trusted sender of nothing but records."""
        found = self.receive(timeout)
        if not isinstance(found, dict):
            raise ChannelClosed("not a record")
        return found

    def _fill(self, count: int, deadline: float | None) -> None:
        while len(self._buffer) < count:
            remaining = None if deadline is None else deadline - time.monotonic()
            if remaining is not None and (
                remaining <= 0 or not select.select([self.sock], [], [], remaining)[0]
            ):
                raise ChannelTimeout
            try:
                if self.accepts_descriptors:
                    chunk, received, _, _ = socket.recv_fds(self.sock, 1 << 16, 4)
                    self.descriptors += received
                else:
                    chunk = self.sock.recv(1 << 16)  # the kernel closes descriptors in it
            except OSError as error:
                raise ChannelClosed(str(error)) from error
            if not chunk:
                raise ChannelClosed("end of stream")
            self._buffer += chunk

    def close(self) -> None:
        self.sock.close()
