"""Workers that are started from nothing, where a process must not fork.

They take longer to start than forked ones, and have what these share each for itself.
"""

from __future__ import annotations

import json
import os
import socket
import sys

from recprune.serve.configuration import ServeSettings, WorkerJob
from recprune.serve.logs import configure_logs, log_problem

_LENGTH_BYTES = 8  # before the job


def spawn_worker(
    job: WorkerJob, line: socket.socket, their_line: socket.socket, handover: socket.socket
) -> int:
    """Start a process with its ends of the line and of the handover; return its number.

    The number alone, as from a fork: it is the supervisor that waits for it, and nothing else.
    """
    for end in (their_line, handover):
        end.set_inheritable(True)
    numbers = [str(end.fileno()) for end in (their_line, handover)]
    # Without the current folder in its path: nothing there is to be imported.
    command = [sys.executable, "-P", "-m", "recprune.serve.processes.spawning", *numbers]
    pid = os.posix_spawn(sys.executable, command, os.environ)
    handover.set_inheritable(False)  # it stays open here, and is no other worker's
    # Not among the arguments, which all on this machine can read: there may be a password in it.
    given = _as_json(job).encode()
    line.sendall(len(given).to_bytes(_LENGTH_BYTES, "big") + given)
    return pid


def _as_json(job: WorkerJob) -> str:
    # What was read from files is in the other settings by now.
    settings = job.settings.model_dump(
        mode="json", exclude={"settings_file", "history_password", "history_password_file"}
    )
    password = job.settings.history_password
    settings["history_password"] = None if password is None else password.get_secret_value()
    return json.dumps(
        {
            "settings": settings,
            "reload_number": job.reload_number,
            "reloads": job.reloads,
            "place": job.place,
        }
    )


def _received_job(line: socket.socket) -> WorkerJob:
    length = int.from_bytes(_received(line, _LENGTH_BYTES), "big")
    job = json.loads(_received(line, length))
    settings = ServeSettings(**job.pop("settings"))
    return WorkerJob(settings, **job)


def _received(line: socket.socket, count: int) -> bytes:
    """Return so many bytes and no more: what follows are messages."""
    received = line.recv(count, socket.MSG_WAITALL)
    if len(received) < count:
        raise ConnectionError("the supervisor is gone")
    return received


def main(line_number: int, handover_number: int) -> int:
    """Be the worker; return its exit code."""
    configure_logs()
    line, handover = socket.socket(fileno=line_number), socket.socket(fileno=handover_number)
    try:
        from recprune.serve.processes.worker import run_worker

        return run_worker(_received_job(line), line, handover)
    except Exception as error:
        log_problem("worker failed", {}, error)
        return 1


if __name__ == "__main__":
    code = main(*map(int, sys.argv[1:]))
    sys.stderr.flush()
    os._exit(code)  # as a forked one: threads of libraries may still be under way
