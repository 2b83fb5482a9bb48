"""C calls that Ctrl-C can stop.

Python runs signal handlers only between bytecodes of the main thread, so a main thread that sits
in C cannot be interrupted; and an exception that a handler raises while a ctypes callback is being
entered or left is printed and lost. Therefore every long C call of a model runs on that model's
own worker thread, which never sees a signal. The caller waits in Python, where KeyboardInterrupt
arrives normally, and then asks C to stop. A callback from C hands its event to the caller's thread
and waits there for the answer, so user code runs on the thread that called.
"""

from __future__ import annotations

import os
import threading
from queue import SimpleQueue
from typing import Any, Callable

#: What `Call.next_event` returns when the call is over.
DONE = object()
#: What `exchange` returns to C's side when the caller wants no more.
STOP = object()
_POLL_SECONDS = 0.02


class Call:
    """One function to run on the worker, and the events it sends on its way.

    `function(exchange)` runs on the worker; ``exchange(event)`` shows `event` to the caller and
    returns its answer. `cancel()` asks the running C code to stop and may be called repeatedly.
    """

    def __init__(self, function: Callable[[Callable[[Any], Any]], Any],
                 cancel: Callable[[], None] = lambda: None) -> None:
        self._function: Callable[[Callable[[Any], Any]], Any] | None = function
        self._cancel = cancel
        self._events: SimpleQueue = SimpleQueue()
        self._answers: SimpleQueue = SimpleQueue()
        self._finished = threading.Event()
        self._stopping = False
        self._result: Any = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """The worker's side."""
        if self._finished.is_set():
            return
        try:
            if not self._stopping:
                self._result = self._function(self._exchange)
        except BaseException as error:
            self._error = error
        finally:
            self._function = None
            self._finished.set()
            self._events.put(DONE)

    def _exchange(self, event: Any) -> Any:
        if self._stopping:
            return STOP
        self._events.put(event)
        return self._answers.get()

    @property
    def finished(self) -> bool:
        return self._finished.is_set()

    def next_event(self) -> Any:
        """The next event, or DONE. Every event but DONE needs an `answer`."""
        return self._events.get()

    def answer(self, value: Any) -> None:
        self._answers.put(value)

    def result(self) -> Any:
        """The function's result after DONE; raises what it raised."""
        if self._error is not None:
            raise self._error
        return self._result

    def stop(self, worker: Worker) -> None:
        """Stops the call and returns when the worker has left it.

        A request to cancel is forgotten by a C call that has not begun yet, so it is repeated. A
        further Ctrl-C meanwhile changes nothing: the first is about to be raised.
        """
        if worker.is_current:  # the garbage collector dropped a stream on the thread it runs on
            self._stopping = True
            self._answers.put(STOP)
            return
        while not self._finished.is_set():
            try:
                if not self._stopping:
                    self._stopping = True
                    # An interrupt may have fallen before the submission; a second one is harmless.
                    worker.submit(self)
                self._answers.put(STOP)
                while not self._finished.wait(_POLL_SECONDS):
                    self._cancel()
            except KeyboardInterrupt:
                continue


class Worker:
    """A thread that runs one `Call` after another, then `at_exit`."""

    def __init__(self, name: str, at_exit: Callable[[], None] = lambda: None) -> None:
        self._queue: SimpleQueue = SimpleQueue()
        self._pid = os.getpid()
        # A daemon: a program may end while a model is open.
        self._thread = threading.Thread(target=_serve, args=(self._queue, at_exit), name=name,
                                        daemon=True)
        self._thread.start()

    @property
    def forked(self) -> bool:
        """True in a child process made by fork, which has no copy of the thread."""
        return os.getpid() != self._pid

    @property
    def is_current(self) -> bool:
        return threading.current_thread() is self._thread

    def submit(self, call: Call) -> None:
        self._queue.put(call)

    def finish(self, wait: bool = True) -> None:
        """Lets the thread end after what was submitted; waits for it unless it is this thread."""
        if self.forked:
            return
        self._queue.put(None)
        if wait and not self.is_current:
            self._thread.join()

    def call(self, function: Callable[[Callable[[Any], Any]], Any],
             cancel: Callable[[], None] = lambda: None,
             answer: Callable[[Any], Any] = lambda event: None) -> Any:
        """Runs `function` to its end, answering its events, and returns its result."""
        call = Call(function, cancel)
        try:
            self.submit(call)
            while (event := call.next_event()) is not DONE:
                call.answer(answer(event))
        finally:
            call.stop(self)
        return call.result()


def _serve(queue: SimpleQueue, at_exit: Callable[[], None]) -> None:
    while True:
        call = queue.get()
        if call is None:
            break
        call.run()
        del call  # it may hold the last reference to something that must be freed
    at_exit()
