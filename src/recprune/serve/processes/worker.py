"""One worker process: its supervisor gives it connections and says when to load and to swap."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Iterator

from recprune.serve.configuration import WorkerJob
from recprune.serve.engine.engine import Engine
from recprune.serve.http.app import create_app
from recprune.serve.http.protocol import protocol_for
from recprune.serve.logs import log, log_problem
from recprune.serve.metric_files import count_at
from recprune.serve.processes.messages import Message, from_line
from recprune.serve.service import ReloadError, ReloadOutcome, Service, open_service
from recprune.types import RecpruneError, needs_extra

with needs_extra("serve"):
    import uvicorn

_GRACE_S = 10  # for requests that have begun, when the service is to end
_AT_ONCE = 16  # connections, before the loop has its turn
CANNOT_START = 3


class _Server(uvicorn.Server):
    """uvicorn, with connections that the supervisor has accepted; it alone says when to end."""

    def __init__(self, config: uvicorn.Config, handover: socket.socket) -> None:
        super().__init__(config)
        handover.setblocking(False)
        self._handover = handover
        self._taken: set[asyncio.Task[object]] = set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the supervisor acts
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.end)
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to take connections; there are no sockets to listen on."""
        del sockets
        await self.lifespan.startup()
        self.servers = []
        self.started = True
        asyncio.get_running_loop().add_reader(self._handover, self._take_connections)

    def end(self) -> None:
        """Finish what has begun, and what was handed over, and take no more."""
        while self._take_connection():
            pass
        asyncio.get_running_loop().remove_reader(self._handover)
        self.should_exit = True

    def _take_connections(self) -> None:
        # Those that are too many must be closed before more are taken: descriptors are few.
        for _ in range(_AT_ONCE):
            if not self._take_connection():
                return

    def _take_connection(self) -> bool:
        """Take one, or return False where there is none."""
        loop = asyncio.get_running_loop()
        try:
            sign, descriptors, _, _ = socket.recv_fds(self._handover, 1, 1)
        except BlockingIOError:
            return False
        if not sign:  # the supervisor is gone, as on the line for messages
            loop.remove_reader(self._handover)
            return False
        if not descriptors:  # none are left for it, and the system has closed it
            log_problem("connection lost", {"reason": "too many open files"})
            return True
        connection = socket.socket(fileno=descriptors[0])
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        task = loop.create_task(loop.connect_accepted_socket(self._protocol, connection))
        self._taken.add(task)
        task.add_done_callback(self._taken.discard)
        return True

    def _protocol(self) -> asyncio.Protocol:
        return self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )


class _Supervised:
    """The worker's end of the line to its supervisor."""

    def __init__(
        self, service: Service, server: _Server, line: socket.socket, reload_number: int
    ) -> None:
        self._service = service
        self._server = server
        self._line = line
        self._reload_number = reload_number
        self._loading: asyncio.Task[None] | None = None
        self._wanted = 0  # the reload that a candidate is loaded for
        self._candidate: Engine | None = None
        self._askers: list[asyncio.Future[Message]] = []
        service.reload_everywhere = self._ask_for_reload

    async def serve(self) -> None:
        reader, self._writer = await asyncio.open_unix_connection(sock=self._line)
        listener = asyncio.create_task(self._listen(reader))
        version = self._service.engine.version
        self._send(Message("ready", version=version, number=self._reload_number))
        await self._server.serve()
        listener.cancel()

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        # A supervisor that was killed with messages unread resets the line, or cuts one short.
        with contextlib.suppress(ConnectionError, ValueError):
            while line := await reader.readline():
                self._handle(from_line(line))
        self._server.end()  # the supervisor is gone: nothing would replace or stop us

    def _handle(self, message: Message) -> None:
        if message.word == "ping":
            self._send(Message("pong"))
        elif message.word == "load":
            self._begin_to_load(message.number)
        elif message.word == "swap":
            self._swap(message)
        elif message.word == "drop":
            self._wanted, self._candidate = 0, None
            self._service.metrics.set_reloads(message.reloads)
        elif message.word == "outcome":
            answered = self._askers[: message.answered]
            self._askers = self._askers[message.answered :]
            for asker in answered:
                if not asker.done():
                    asker.set_result(message)

    def _begin_to_load(self, number: int) -> None:
        if self._loading is not None and not self._loading.done():
            text = "a worker still loads the folder for an earlier reload"
            self._send(Message("not_loaded", text=text, public_text=text, number=number))
            return
        self._wanted = number
        self._loading = asyncio.create_task(self._load(number))

    async def _load(self, number: int) -> None:
        try:
            engine = await asyncio.to_thread(self._service.load)
        except RecpruneError as error:
            public = self._service.without_paths(error)
            answer = Message("not_loaded", text=str(error), public_text=public, number=number)
        except Exception as error:  # a damaged folder can fail in ways of its own
            log_problem("reload failed", {}, error)
            text = f"cannot be loaded: {type(error).__name__}"
            answer = Message("not_loaded", text=text, public_text=text, number=number)
        else:
            if number == self._wanted:  # else it took too long, and the reload has failed
                self._candidate = engine
            answer = Message("loaded", version=engine.version, number=number)
        self._send(answer)

    def _swap(self, message: Message) -> None:
        version = ""
        if self._candidate is not None:
            self._service.swap(self._candidate)
            version = self._candidate.version
            self._candidate = None
        self._service.metrics.set_reloads(message.reloads)
        self._send(Message("swapped", version=version, number=message.number))

    async def _ask_for_reload(self) -> ReloadOutcome:
        asker: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._askers.append(asker)
        self._send(Message("reload"))
        outcome = await asker
        if outcome.text:
            raise ReloadError(outcome.public_text)
        return ReloadOutcome(outcome.version, outcome.workers)

    def _send(self, message: Message) -> None:
        self._writer.write(message.to_line())


def run_worker(job: WorkerJob, line: socket.socket, handover: socket.socket) -> int:
    """Serve until told to end; return an exit code."""
    settings = job.settings
    count_at(job.place)
    try:
        service = open_service(settings)
    except RecpruneError as error:
        line.sendall(Message("failed", text=str(error)).to_line())
        return CANNOT_START
    service.metrics.set_reloads(job.reloads)
    config = uvicorn.Config(
        create_app(settings, service),
        http=protocol_for(settings.limits, service.metrics.count_turned_away),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=_GRACE_S,
    )
    log("worker started", {"version": service.engine.version})
    server = _Server(config, handover)
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(_Supervised(service, server, line, job.reload_number).serve())
    log("worker ended", {})
    return 0
