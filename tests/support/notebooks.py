"""Run the notebooks of the site: `make notebooks` keeps what they print."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[2] / "docs" / "notebooks"


def run(path: Path, folder: Path) -> nbformat.NotebookNode:
    """Return a notebook as it is after it was run in a folder; a cell that fails is an error."""
    notebook: nbformat.NotebookNode = nbformat.read(path, as_version=4)
    where = {"metadata": {"path": str(folder)}}
    client = NotebookClient(notebook, timeout=300, coalesce_streams=True, resources=where)
    kernel = client.create_kernel_manager()
    # Files that only this user can open, not ports, which everybody on the machine can. In a
    # folder of their own, for the paths of sockets are short.
    with tempfile.TemporaryDirectory() as sockets:
        kernel.transport = "ipc"
        kernel.ip = str(Path(sockets) / "kernel")
        client.execute()
    for cell in notebook.cells:
        cell.metadata.clear()  # when it ran
        if cell.cell_type == "code":
            cell.execution_count = None
            for output in cell.outputs:
                output.pop("execution_count", None)
    notebook.metadata = {"language_info": {"name": "python"}}
    return notebook


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]) if sys.argv[1:] else sorted(FOLDER.glob("*.ipynb")):
        with tempfile.TemporaryDirectory() as scratch:
            nbformat.write(run(path, Path(scratch)), path)
