"""A program in the place of the interpreter that has vLLM: a server with an engine of its own."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import psutil

# Takes vLLM's command line; an engine of its own ignores SIGTERM, as a stuck one does.
FAKE = """#!{python}
import http.server, os, signal, subprocess, sys
arguments = sys.argv
assert arguments[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
if "--fail" in arguments:
    print("ValueError: no room for the key-value cache")
    sys.exit(3)
engine = subprocess.Popen([sys.executable, "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"])
open({pids!r}, "w").write(f"{{os.getpid()}} {{engine.pid}}")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *rest):
        pass
port = int(arguments[arguments.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def install(folder: Path) -> tuple[Path, Path]:
    """Write the program; gives its path, and that of the file that it leaves its process ids in."""
    path, python = folder / "pids", folder / "python"
    python.write_text(FAKE.format(python=sys.executable, pids=str(path)))
    python.chmod(0o755)
    return python, path


def gone(pids: Path) -> bool:
    return not any(
        psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        for pid in map(int, pids.read_text().split())
    )


def wait_until_gone(pids: Path) -> None:
    deadline = time.monotonic() + 60
    while not gone(pids):
        assert time.monotonic() < deadline, "the server outlived its parent"
        time.sleep(0.05)
