"""The stand-in for a Python that is forked from a warm server; see ``warm.py``. Runs isolated, imports next to nothing.

python -I -S warm_client.py SOCKET REAL_PYTHON ARGUMENTS...
"""

import os
import signal
import socket
import sys
import time

WAIT_SECONDS = 180.0  # for a server that is still importing


def connect(address: str, server: int) -> socket.socket | None:
    """The connection, as soon as the server listens; None if it is gone or does not come."""
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        line = socket.socket(socket.AF_UNIX)
        try:
            line.connect(address)
            return line
        except OSError:
            line.close()
        if server and not os.path.exists(f"/proc/{server}"):
            return None
        time.sleep(0.05)
    return None


def main() -> int:
    address, python, *arguments = sys.argv[1:]
    files = sorted(int(name) for name in os.listdir("/proc/self/fd"))
    files = [one for one in files if os.path.exists(f"/proc/self/fd/{one}")]  # not the listing itself
    line = connect(address, int(os.environ.get("MMQA_WARM_PID", "0")))
    if line is None:
        os.execv(python, [python, *arguments])
    import json

    request = {"argv": arguments, "environ": dict(os.environ), "cwd": os.getcwd(), "files": files}
    data = (json.dumps(request) + "\n").encode()
    sent = socket.send_fds(line, [data], files)
    line.sendall(data[sent:])
    for number in (signal.SIGTERM, signal.SIGINT):  # the fork gets its own: sent on by its process id below
        signal.signal(number, lambda got, frame: forward(line, got))
    answer = b""
    while not answer.endswith(b"\n"):
        part = line.recv(64)
        if not part:
            return 1
        answer += part
    code = int(answer)
    if code < 0:  # ended by a signal: end the same way, so that whoever waits sees it
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -code)
    return code


def forward(line: socket.socket, number: int) -> None:
    """Pass a signal on to the fork through the connection."""
    line.sendall(bytes([number]))


if __name__ == "__main__":
    sys.exit(main())
