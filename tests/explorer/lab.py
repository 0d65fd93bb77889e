"""A JupyterLab of its own, for tests in a browser: a server on a free port, and no network."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TOKEN = "a-token-for-tests"
# Nothing may ask the internet for news, and no dialog may cover the notebook.
QUIET = {
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "apputils-extension/themes": {"theme": "JupyterLab Light"},
}


@dataclass
class Lab:
    """A running server and the folder that it shows."""

    folder: Path
    port: int

    def url(self, notebook: str) -> str:
        return f"http://127.0.0.1:{self.port}/lab/tree/{notebook}?token={TOKEN}&reset"

    def write(self, name: str, *cells: str) -> Path:
        """A notebook of code cells, not yet run."""
        import nbformat

        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
        kernel = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}
        notebook.metadata |= {"kernelspec": kernel, "language_info": {"name": "python"}}
        path = self.folder / name
        nbformat.write(notebook, path)
        return path


@contextmanager
def running_lab(folder: Path) -> Iterator[Lab]:
    """A server for the length of a block; kernels and server are ended with it."""
    root, own = folder / "notebooks", folder / "jupyter"
    root.mkdir(parents=True)
    for name, settings in QUIET.items():
        path = own / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(settings))
    environment = os.environ | {
        "JUPYTER_CONFIG_DIR": str(own / "config"),
        "JUPYTER_RUNTIME_DIR": str(own / "runtime"),
        "JUPYTERLAB_SETTINGS_DIR": str(own / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(own / "workspaces"),
        "IPYTHONDIR": str(own / "ipython"),
        "OMP_NUM_THREADS": "1",
    }
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"]
    command += [f"--ServerApp.port={port}", "--ServerApp.port_retries=0"]
    command += ["--ServerApp.ip=127.0.0.1", f"--ServerApp.root_dir={root}"]
    command += [f"--IdentityProvider.token={TOKEN}"]
    command += ["--LabApp.expose_app_in_browser=True", "--LabApp.extension_manager=readonly"]
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            _wait_for(server, port, folder / "server.log")
            yield Lab(root, port)
        finally:
            server.terminate()  # a terminated server ends its kernels
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _wait_for(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    for _ in range(3000):
        if server.poll() is not None:
            break
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/api?token={TOKEN}", timeout=1).close()
            return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(f"JupyterLab did not start:\n{log.read_text()[-3000:]}")


def command(page: Any, name: str, **arguments: Any) -> None:
    """Run a command of JupyterLab, without waiting for its end."""
    page.evaluate(
        "([name, args]) => { void window.jupyterapp.commands.execute(name, args); }",
        [name, arguments],
    )


def open_notebook(page: Any, lab: Lab, name: str) -> None:
    """Open a notebook and wait for its kernel."""
    page.goto(lab.url(name))
    page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=180_000)
    wait_for_kernel(page)


def wait_for_kernel(page: Any) -> None:
    """Wait until the kernel of the open notebook has nothing to do."""
    idle = "window.jupyterapp.shell.currentWidget?.sessionContext?.session?.kernel?.status"
    page.wait_for_function(f"{idle} === 'idle'", timeout=300_000)
