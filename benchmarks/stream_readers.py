"""Reads many streamed answers at once and throws them away; the clients of `http_streaming.py`.

python stream_readers.py PORT COUNT < request
"""

import selectors
import socket
import sys


def read_streams(port: int, request: bytes, count: int) -> None:
    """Send a request over each of `count` connections and read all to their ends."""
    selector = selectors.DefaultSelector()
    for _ in range(count):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall(request)
        connection.setblocking(False)
        selector.register(connection, selectors.EVENT_READ)
    while count:
        for key, _ in selector.select():
            connection = key.fileobj
            assert isinstance(connection, socket.socket)
            if not connection.recv(1 << 16):
                selector.unregister(connection)
                connection.close()
                count -= 1


if __name__ == "__main__":
    read_streams(int(sys.argv[1]), sys.stdin.buffer.read(), int(sys.argv[2]))
