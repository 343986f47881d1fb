"""nginx and HAProxy before a server, with their defaults: only where they forward, listen and write is set."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests import leaked_keys

NGINX = """
daemon off; pid {folder}/nginx.pid; error_log {folder}/error.log;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
    server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass {upstream}; }} }}
}}
"""
HAPROXY = """
defaults
    mode http
    timeout connect 5s
    timeout client 60s
    timeout server 60s
frontend clients
    bind 127.0.0.1:{port}
    default_backend tandem
backend tandem
    server tandem {address}
"""
COMMANDS = {"nginx": (NGINX, ("nginx", "-c")), "HAProxy": (HAPROXY, ("haproxy", "-db", "-f"))}
_START_S = 20.0


def version(name: str) -> str | None:
    """Return the installed proxy's version, None if it is not installed."""
    program = shutil.which(name.lower(), path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin")
    if program is None:
        return None
    done = subprocess.run([program, "-v"], capture_output=True, text=True, check=True)
    words = (done.stdout + done.stderr).replace("/", " ").split()
    return next(word for word in words if word[0].isdigit()).partition("-")[0]


@contextmanager
def before(upstream: str, name: str, folder: Path) -> Iterator[str]:
    """Run the proxy ``name`` before ``upstream``, with its files in ``folder``; yield its URL."""
    configuration, (program, *flags) = COMMANDS[name]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    file = folder / f"{program}.conf"
    address = upstream.removeprefix("http://")
    file.write_text(configuration.format(folder=folder, port=port, upstream=upstream, address=address))
    found = shutil.which(program, path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin")
    assert found is not None, f"{program} is not installed"
    log = folder / f"{program}.log"
    leaked_keys.watch(log)
    with log.open("wb") as output:
        process = subprocess.Popen([found, *flags, str(file)], stdout=output, stderr=subprocess.STDOUT)
    try:
        _wait(port, process, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def _wait(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)
        else:
            return
