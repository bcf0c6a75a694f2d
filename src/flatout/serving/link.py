"""The server's end of the pipe to the process that decodes. No torch here."""

import asyncio
import contextlib
import json
import sys
from typing import Any, final

from flatout.confined import root_of
from flatout.errors import ResourceError, UserError
from flatout.serving.fields import Refused

# Signals are for the server, which ends the process; they may come while it still imports. What is imported stays, and
# looking for garbage in it takes a tenth of the time.
_START = """
import gc, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sys.path.append(sys.argv[1])
gc.disable()
from flatout.serving.worker import main
gc.freeze()
gc.enable()
sys.exit(main())
"""
_LONGEST_LINE = 2**26  # bytes


@final
class EngineLink:
    """Starts the process, sends it requests, and hands its events to whoever waits for them."""

    def __init__(self) -> None:
        self.process: asyncio.subprocess.Process | None = None
        self.jobs: dict[str, asyncio.Queue[dict[str, Any]]] = {}
        self.stats: dict[str, int] = {}
        self.ended = asyncio.Event()
        self.count = 0
        self._listening: asyncio.Task[None] | None = None

    async def start(self, asked: dict[str, Any]) -> dict[str, Any]:
        """What the process says of its model, once that is loaded. Mistakes are those of `load_model`."""
        pipe = asyncio.subprocess.PIPE
        words = [sys.executable, "-P", "-c", _START, root_of("flatout")]
        how = {"limit": _LONGEST_LINE, "start_new_session": True}
        self.process = await asyncio.create_subprocess_exec(*words, stdin=pipe, stdout=pipe, **how)
        self._send(asked)
        message = await self._receive() or {}
        if "failed" in message:
            what, hint, code = message["failed"]
            error = UserError(what, hint)
            error.exit_code = code
            raise error
        if "ready" not in message:
            raise self.why_ended()
        self._listening = asyncio.create_task(self._listen())
        return message["ready"]

    def open(self, work: dict[str, Any]) -> tuple[str, asyncio.Queue[dict[str, Any]]]:
        """Sends a request; its events come in the queue."""
        self.count += 1
        id = str(self.count)
        events = self.jobs[id] = asyncio.Queue()
        self._send({"do": "add", "id": id, "work": work})
        return id, events

    def close_job(self, id: str) -> None:
        """Forgets a request; one that still goes on gives its rows back."""
        if self.jobs.pop(id, None) is not None:
            self._send({"do": "cancel", "id": id})

    def fail_all(self, message: str) -> None:
        for events in self.jobs.values():
            events.put_nowait({"failed": message})

    async def close(self) -> None:
        """Ends the process: with its input, or else by a signal."""
        if self.process is None:
            return
        assert self.process.stdin is not None
        self.process.stdin.close()
        if self._listening is not None:
            await asyncio.wait({self._listening}, timeout=5.0)
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()

    def why_ended(self) -> ResourceError:
        code = None if self.process is None else self.process.returncode
        return ResourceError(
            f"the process that decodes has ended (exit code {code})",
            "see what it printed; if memory was short, ask for fewer --rows",
        )

    def _send(self, message: dict[str, Any]) -> None:
        assert self.process is not None
        assert self.process.stdin is not None
        if not self.process.stdin.is_closing():
            self.process.stdin.write(json.dumps(message).encode() + b"\n")

    async def _receive(self) -> dict[str, Any] | None:
        assert self.process is not None
        assert self.process.stdout is not None
        line = await self.process.stdout.readline()
        if not line.endswith(b"\n"):
            await self.process.wait()
            return None
        return json.loads(line)

    async def _listen(self) -> None:
        with contextlib.suppress(ValueError):  # of a line that is too long
            while (message := await self._receive()) is not None:
                if "stats" in message:
                    self.stats = message["stats"]
                elif (events := self.jobs.get(message["id"])) is not None:
                    events.put_nowait(message)
        self.ended.set()
        self.fail_all("the process that decodes has ended")


def raise_for(event: dict[str, Any]) -> dict[str, Any]:
    """The event, unless it says that the request has failed."""
    if "refused" in event:
        message, param, code = event["refused"]
        raise Refused(message, param, code)
    if "failed" in event:
        raise Refused(event["failed"], status=500)
    return event
