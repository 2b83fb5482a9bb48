"""An opened model: text in, text out."""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import _abi
from ._params import (DEFAULT_CTX, GenerateParams, id_array, ids_pointer, model_params, parse_size,
                      path_bytes, path_list)
from ._worker import DONE, STOP, Call, Worker
from .errors import ContextError, UsageError, check
from .generation import FINISH_REASONS, Generation, Stats, Token
from .plan import Plan, plan


@dataclass(frozen=True, slots=True)
class Info:
    """Facts about an opened model; sizes are bytes, the rest stands at ``hr_model_info``."""

    vocab_size: int
    hidden_size: int
    layers: int
    moe_layers: int
    experts: int
    top_k: int
    ctx: int
    max_position: int
    threads: int
    io_threads: int
    chunk: int
    has_tokenizer: bool
    stop_ids: tuple[int, ...]
    parameters: int
    trunk_bytes: int
    expert_bytes: int
    record_bytes: int
    container_bytes: int
    name: str
    isa: str
    io_mode: str
    trunk_codec: str
    expert_codec: str
    container_sha256: str
    drives: int
    expert_activations: int
    trunk_locked: bool

    @classmethod
    def from_c(cls, raw: _abi.hr_model_info) -> Info:
        values: dict[str, Any] = {}
        for name in cls.__slots__:
            value = getattr(raw, name)
            values[name] = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
        values["stop_ids"] = tuple(raw.stop_ids[: raw.stop_count])
        values["has_tokenizer"] = bool(raw.has_tokenizer)
        values["trunk_locked"] = bool(raw.trunk_locked)
        return cls(**values)


@dataclass(frozen=True, slots=True)
class Drive:
    """One directory's part in reading experts; the meaning of each field stands at ``hr_drive_info``."""

    path: str
    io_mode: str
    banks: int
    in_flight: int
    reads: int
    bytes_read: int
    failures: int
    left_out: bool
    seconds_reading: float
    probed: float


class _Engine:
    """The C handles of one model, and who may use them.

    `turn` is held for the length of a call on the session and `owner` is the thread that holds
    it; `handles` is held for short calls on the model and while the handles are freed. The
    worker thread frees them, so nothing is freed under a call that runs.
    """

    def __init__(self, lib: ctypes.CDLL) -> None:
        self.lib = lib
        self.model = ctypes.c_void_p()
        self.session = ctypes.c_void_p()
        self.turn = threading.Lock()
        self.handles = threading.Lock()
        self.owner: int | None = None
        self.call: Call | None = None
        self.closed = False
        self.worker = Worker("headrace", at_exit=self._free)

    def open(self, path: bytes, params: _abi.hr_model_params) -> None:
        def function(_exchange: Any) -> None:
            error = _abi.hr_error()
            check(self.lib.hr_model_open(path, ctypes.byref(params), ctypes.byref(self.model),
                                         ctypes.byref(error)), error)

        call = Call(function)
        try:
            self.worker.submit(call)
            call.next_event()
            call.result()
        except BaseException:
            # Opening cannot be cancelled: what it still opens, the worker frees.
            self.closed = True
            self.worker.finish(wait=False)
            raise

    def session_handle(self) -> ctypes.c_void_p:
        """The session, made at the first use."""
        if not self.session:
            error = _abi.hr_error()
            check(self.lib.hr_session_create(self.model, ctypes.byref(self.session),
                                             ctypes.byref(error)), error)
        return self.session

    def cancel(self) -> None:
        session = self.session
        if session:
            self.lib.hr_cancel(session)

    def check_open(self) -> None:
        if self.closed:
            raise UsageError("the model is closed")
        if self.worker.forked:
            raise UsageError("a model cannot be used in a forked process; open it again there")

    def check_turn(self) -> None:
        """Refuses what would wait for itself."""
        self.check_open()
        if self.owner == threading.get_ident():
            raise UsageError("this model is busy on this thread: inside a callback, or with a "
                             "stream that is neither finished nor closed")

    def close(self) -> None:
        if self.closed or self.worker.forked:
            return
        self.closed = True
        call = self.call
        if call is not None:
            call.stop(self.worker)
        self.worker.finish()

    def _free(self) -> None:
        with self.handles:
            self.lib.hr_session_free(self.session)
            self.lib.hr_model_close(self.model)
            self.session, self.model = ctypes.c_void_p(), ctypes.c_void_p()


class Stream(Iterator[Token]):
    """Tokens as they are generated. Leaving it early stops the generation.

    `generation` holds the result once the iterator is exhausted, None before.
    """

    def __init__(self, run: Any) -> None:
        self._run = run
        self.generation: Generation | None = None

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Token:
        try:
            return next(self._run)
        except StopIteration as end:
            if end.value is not None:
                self.generation = end.value
            raise StopIteration from None

    def close(self) -> None:
        """Stops generating; the model is free for other calls afterwards."""
        self._run.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


class Model:
    """A container opened for evaluation and generation.

    Args:
        path: the container directory.
        ram: hard ceiling in bytes on what the engine allocates; an int, or a text such as "8GiB".
            None: three quarters of what is really available.
        threads: compute threads, the caller's included; 0 = the physical cores available.
        ctx: tokens a session can hold. The default, 4096, is lowered to the model's own limit.
        isa: "auto", "reference", "avx2", "avx512" or "neon".
        chunk: most tokens evaluated together in prefill; 0 = by memory, at most 512.
        cache_policy: which expert leaves the cache: "auto", "lru" or "lfu".
        direct: bypass the page cache where the file system can.
        verify: when expert records are checked against their checksum: "first", "always", "off".
        io_threads: reads in flight on each drive; 0 = measured while opening, or 4.
        max_sessions: sessions that `ram` must hold. A Model uses one.
        shuffle_reads: testing aid; a seed that shuffles the order in which reads arrive.
        read_ahead: experts of the next layer that are read before they are known: "auto" (as long as it
            saves time), "off", or how many of the best ranks for a token.
        drives: directories on other drives with copies of bank files, or with some that `path` lacks.
        usage: a file that ``save_usage`` wrote for this container: what was used most begins as warm.
        lock: keep the resident weights from being paged out: "auto" (where the system allows it), "on"
            (HeadraceMemoryError where it does not), "off".

    Raises:
        FormatError: the container is damaged or not one. HeadraceMemoryError: `ram` is below the
        floor, which the message names. HeadraceIOError, UnsupportedError, UsageError.

    No setting changes a bit of any result. A model may be shared between threads: calls that
    evaluate take turns. User callbacks run on the calling thread. The interpreter lock is free
    while C computes. Ctrl-C stops any call within one token, in prefill within one layer. ``close``
    (or leaving a ``with`` block) frees everything; it may be called twice, and a model that is
    dropped or still open when the interpreter ends is closed by itself.
    """

    def __init__(self, path: str | os.PathLike[str], *, ram: int | str | None = None,
                 threads: int = 0, ctx: int = DEFAULT_CTX, isa: str = "auto", chunk: int = 0,
                 cache_policy: str = "auto", direct: bool = True, verify: str = "first",
                 io_threads: int = 0, max_sessions: int = 1, shuffle_reads: int = 0,
                 drives: Iterable[str | os.PathLike[str]] = (),
                 read_ahead: int | str = "auto",
                 usage: str | os.PathLike[str] | None = None, lock: str = "auto") -> None:
        lib = _abi.library()
        self.path = path
        self._settings: dict[str, Any] = dict(
            ram=ram, threads=threads, ctx=ctx, isa=isa, chunk=chunk, cache_policy=cache_policy,
            direct=direct, verify=verify, io_threads=io_threads, max_sessions=max_sessions,
            shuffle_reads=shuffle_reads, drives=path_list(drives, "drives"),
            read_ahead=read_ahead, usage=usage, lock=lock)
        params = model_params(lib, **self._settings)
        where = path_bytes(path)
        self._engine = _Engine(lib)
        # Runs when the model is dropped and, before modules are torn down, at interpreter exit.
        self._finalizer = weakref.finalize(self, self._engine.close)
        self._engine.open(where, params)

    # ---- life ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Frees the model. A call that runs is stopped first. May be called twice."""
        self._finalizer()

    @property
    def closed(self) -> bool:
        return self._engine.closed

    def __enter__(self) -> Model:
        self._engine.check_open()
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._engine.closed else "open"
        return f"<headrace.Model {os.fspath(self.path)!r} ({state})>"

    # ---- facts ---------------------------------------------------------------------------------

    def _short(self, function: Callable[[ctypes.CDLL, ctypes.c_void_p], Any]) -> Any:
        engine = self._engine
        with engine.handles:
            engine.check_open()
            return function(engine.lib, engine.model)

    @property
    def info(self) -> Info:
        """Sizes, limits and the modes in use."""
        raw = _abi.hr_model_info(size=ctypes.sizeof(_abi.hr_model_info))
        error = _abi.hr_error()
        check(self._short(lambda lib, model: lib.hr_model_get_info(
            model, ctypes.byref(raw), ctypes.byref(error))), error)
        return Info.from_c(raw)

    @property
    def stats(self) -> Stats:
        """Totals since the model was opened."""
        raw = _abi.hr_stats(size=ctypes.sizeof(_abi.hr_stats))
        error = _abi.hr_error()
        check(self._short(lambda lib, model: lib.hr_get_stats(
            model, ctypes.byref(raw), ctypes.byref(error))), error)
        return Stats.from_c(raw)

    @property
    def drives(self) -> tuple[Drive, ...]:
        """The container's own directory, then those given as `drives`."""
        found = []
        for index in range(self.info.drives):
            raw = _abi.hr_drive_info(size=ctypes.sizeof(_abi.hr_drive_info))
            error = _abi.hr_error()
            check(self._short(lambda lib, model: lib.hr_get_drive(
                model, index, ctypes.byref(raw), ctypes.byref(error))), error)
            found.append(Drive(
                os.fsdecode(raw.path), raw.io_mode.decode(), raw.banks, raw.in_flight, raw.reads,
                raw.bytes_read, raw.failures, bool(raw.left_out), raw.seconds_reading, raw.probed))
        return tuple(found)

    def set_ram(self, ram: int | str) -> None:
        """Lowers the budget, or raises it again up to what the model was opened with.

        The expert cache gives or takes the difference, also while another thread evaluates.
        Raises HeadraceMemoryError when `ram` is below what the model takes without a cache.
        """
        error = _abi.hr_error()
        size = parse_size(ram)
        check(self._short(lambda lib, model: lib.hr_model_set_ram(
            model, size, ctypes.byref(error))), error)

    def save_usage(self, path: str | os.PathLike[str]) -> None:
        """Writes how often each expert was used, on top of the counts the model was opened with, to
        a file that appears whole or not at all."""
        error = _abi.hr_error()
        where = path_bytes(path)
        check(self._short(lambda lib, model: lib.hr_model_save_usage(
            model, where, ctypes.byref(error))), error)

    def plan(self, **changes: Any) -> Plan:
        """What this model needs with its settings, or with some of them changed."""
        return plan(self.path, **(self._settings | changes))

    # ---- text ----------------------------------------------------------------------------------

    def tokenize(self, text: str | bytes, special: bool = False) -> list[int]:
        """Token ids of a text.

        Args:
            text: a str, or UTF-8 bytes; ill-formed bytes count as U+FFFD.
            special: recognise the spellings of control tokens. False: never produce one.
        Raises:
            UnsupportedError: the container has no tokenizer.
        """
        raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else bytes(text)
        error = _abi.hr_error()
        count = ctypes.c_size_t()
        room = len(raw) + 16
        while True:
            ids = (ctypes.c_int32 * room)()
            status = self._short(lambda lib, model: lib.hr_tokenize(
                model, raw, len(raw), 1 if special else 0, ids, room, ctypes.byref(count),
                ctypes.byref(error)))
            if status == _abi.HR_ERR_USAGE and count.value > room:
                room = count.value
                continue
            check(status, error)
            return ids[: count.value]

    def detokenize_bytes(self, ids: Iterable[int]) -> bytes:
        """The raw bytes of token ids, which need not be valid UTF-8."""
        array = id_array(ids)
        error = _abi.hr_error()
        count = ctypes.c_size_t()
        room = 16 * array.size + 16
        while True:
            buffer = ctypes.create_string_buffer(room)
            status = self._short(lambda lib, model: lib.hr_detokenize(
                model, ids_pointer(array), array.size, buffer, room, ctypes.byref(count),
                ctypes.byref(error)))
            if status == _abi.HR_ERR_USAGE and count.value > room:
                room = count.value
                continue
            check(status, error)
            return buffer.raw[: count.value]

    def detokenize(self, ids: Iterable[int]) -> str:
        """The text of token ids; every ill-formed sequence becomes U+FFFD."""
        return self.detokenize_bytes(ids).decode("utf-8", "replace")

    # ---- evaluation ----------------------------------------------------------------------------

    def _evaluate(self, function: Callable[[ctypes.CDLL, ctypes.c_void_p, _abi.hr_error], int],
                  ) -> None:
        """Runs one call on the session; `function` returns its status."""
        engine = self._engine
        engine.check_turn()
        with engine.turn:
            engine.owner = threading.get_ident()
            try:
                engine.check_open()

                def run(_exchange: Any) -> None:
                    error = _abi.hr_error()
                    check(function(engine.lib, engine.session_handle(), error), error)

                engine.worker.call(run, engine.cancel)
            finally:
                engine.owner = None

    def logits(self, ids: Iterable[int], *, keep: bool = False) -> NDArray[np.float32]:
        """Logits after every token of `ids`.

        Args:
            ids: token ids.
            keep: continue behind what this model evaluated last instead of a fresh state. A long
                text evaluated in pieces has the same bits as the whole and needs less memory.
        Returns:
            float32 [len(ids), vocab_size]; row i predicts the token behind ids[i].
        Raises:
            ContextError: more ids than the context holds. UsageError: an id outside the vocabulary.
        """
        array = id_array(ids)
        out = np.empty((array.size, self.info.vocab_size), np.float32)
        if not keep:
            self._check_fresh(array)
        if array.size:
            target = out.ctypes.data_as(ctypes.POINTER(ctypes.c_float))

            def function(lib: ctypes.CDLL, session: ctypes.c_void_p, error: _abi.hr_error) -> int:
                if not keep:
                    lib.hr_session_reset(session)
                return lib.hr_eval(session, ids_pointer(array), array.size, _abi.HR_LOGITS_ALL,
                                   target, ctypes.byref(error))

            self._evaluate(function)
        return out

    def routes(self, ids: Iterable[int]) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Experts that `ids`, evaluated from a fresh state, were routed to.

        Returns:
            ids int32 and mixing weights float32, both [moe_layers, len(ids), top_k], in rank order
            (score descending, id ascending); -1 where a layer chooses fewer.
        """
        array = id_array(ids)
        info = self.info
        shape = (info.moe_layers, array.size, info.top_k)
        experts, weights = np.empty(shape, np.int32), np.empty(shape, np.float32)
        if array.size == 0:
            return experts, weights

        def function(lib: ctypes.CDLL, session: ctypes.c_void_p, error: _abi.hr_error) -> int:
            lib.hr_session_reset(session)
            status = lib.hr_session_record_routes(session, array.size, ctypes.byref(error))
            if status == _abi.HR_OK:
                status = lib.hr_eval(session, ids_pointer(array), array.size, _abi.HR_LOGITS_NONE,
                                     None, ctypes.byref(error))
            if status == _abi.HR_OK:
                status = lib.hr_session_routes(
                    session, array.size, ids_pointer(experts),
                    weights.ctypes.data_as(ctypes.POINTER(ctypes.c_float)), ctypes.byref(error))
            lib.hr_session_record_routes(session, 0, None)
            return status

        self._evaluate(function)
        return experts, weights

    def layer_inputs(
        self, ids: Iterable[int],
        seen: Callable[[int, NDArray[np.float32], NDArray[np.int32], NDArray[np.float32]], None],
    ) -> None:
        """Evaluates `ids` from a fresh state and shows what every MoE layer's routed experts read.

        Args:
            seen: called as seen(layer, inputs, ids, weights) for each chunk: decoder layer index;
                inputs float32 [n, width]; experts int32 and mixing weights float32 [n, top_k] in
                rank order. The arrays are copies. An exception it raises reaches the caller.
        """
        array = id_array(ids)
        raised: list[BaseException] = []

        def tap(_user: int, layer: int, n: int, width: int, top_k: int, inputs: Any, experts: Any,
                weights: Any) -> None:
            if raised:
                return
            try:
                seen(layer, np.ctypeslib.as_array(inputs, (n, width)).copy(),
                     np.ctypeslib.as_array(experts, (n, top_k)).copy(),
                     np.ctypeslib.as_array(weights, (n, top_k)).copy())
            except BaseException as error:  # noqa: BLE001: must not unwind through C
                raised.append(error)

        callback = _abi.hr_moe_fn(tap)

        def function(lib: ctypes.CDLL, session: ctypes.c_void_p, error: _abi.hr_error) -> int:
            lib.hr_session_reset(session)
            lib.hr_session_tap(session, callback, None, None)
            try:
                return lib.hr_eval(session, ids_pointer(array), array.size, _abi.HR_LOGITS_NONE,
                                   None, ctypes.byref(error))
            finally:
                lib.hr_session_tap(session, _abi.hr_moe_fn(), None, None)

        if array.size:
            self._evaluate(function)
        if raised:
            raise raised[0]

    # ---- state ---------------------------------------------------------------------------------

    @property
    def position(self) -> int:
        """Tokens that the session has evaluated."""
        return self._short(lambda lib, _model: lib.hr_session_position(self._engine.session)
                           if self._engine.session else 0)

    def save_state(self, path: str | os.PathLike[str]) -> None:
        """Writes the session's state to a file, which appears whole or not at all."""
        where = path_bytes(path)
        self._evaluate(lambda lib, session, error: lib.hr_session_save(
            session, where, ctypes.byref(error)))

    def load_state(self, path: str | os.PathLike[str]) -> None:
        """Replaces the session's state; on any error it is as before."""
        where = path_bytes(path)
        self._evaluate(lambda lib, session, error: lib.hr_session_load(
            session, where, ctypes.byref(error)))

    # ---- generation ----------------------------------------------------------------------------

    def generate(self, prompt: str | Iterable[int], *, max_tokens: int | None = 256,
                 temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0,
                 repetition_penalty: float = 1.0, seed: int = 0, stop: str | Iterable[str] = (),
                 stop_ids: Iterable[int] = (), ignore_stop_ids: bool = False,
                 on_token: Callable[[Token], object] | None = None, keep: bool = False,
                 special: bool = False) -> Generation:
        """Generates text after `prompt`.

        Args:
            prompt: a text, or token ids.
            max_tokens: most tokens to generate; None = until the context is full.
            temperature: 0 = always the most probable token.
            top_k, top_p, min_p: what may be sampled; 0, 1 and 0 switch them off.
            repetition_penalty: 1 = off; over the prompt and what was generated.
            seed: the same seed gives the same text on every machine.
            stop: one or several texts (at most 16) that end it; they are not part of the result.
            stop_ids: ids that end it, in addition to the model's own, which `ignore_stop_ids`
                switches off.
            on_token: called with each :class:`Token` on this thread; returning False stops.
                What it raises, KeyboardInterrupt too, arrives here, and the model stays usable.
            keep: continue behind what this model evaluated last instead of a fresh state; then
                the prompt may be empty.
            special: recognise control tokens in a prompt that is text.

        Raises:
            ContextError: the prompt does not fit. UsageError: a value out of range.
        """
        run = self._prepare(prompt, keep, special, on_token is not None, max_tokens=max_tokens,
                            temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
                            repetition_penalty=repetition_penalty, seed=seed, stop=stop,
                            stop_ids=stop_ids, ignore_stop_ids=ignore_stop_ids)
        try:
            more: object = None
            while True:
                try:
                    token = run.send(more)
                except StopIteration as end:
                    return end.value
                assert on_token is not None
                more = on_token(token)
        finally:
            run.close()

    def stream(self, prompt: str | Iterable[int], *, max_tokens: int | None = 256,
               temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0,
               repetition_penalty: float = 1.0, seed: int = 0, stop: str | Iterable[str] = (),
               stop_ids: Iterable[int] = (), ignore_stop_ids: bool = False, keep: bool = False,
               special: bool = False) -> Stream:
        """Like :meth:`generate`, as an iterator of tokens.

        The next token is computed when it is asked for. Leaving the loop early stops the
        generation; while a stream is neither finished nor closed the model is busy.
        """
        return Stream(self._prepare(
            prompt, keep, special, True, max_tokens=max_tokens, temperature=temperature,
            top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty,
            seed=seed, stop=stop, stop_ids=stop_ids, ignore_stop_ids=ignore_stop_ids))

    def _prepare(self, prompt: str | Iterable[int], keep: bool, special: bool, hand_over: bool,
                 **settings: Any) -> Any:
        """Checks the arguments; returns the generator of `_run`."""
        engine = self._engine
        engine.check_turn()
        params = GenerateParams(engine.lib, **settings)
        if isinstance(prompt, (str, bytes)):
            prompt = self.tokenize(prompt, special)
        ids = id_array(prompt)
        if not keep:
            self._check_fresh(ids)
        return self._run(ids, params, keep, hand_over)

    def _check_fresh(self, ids: NDArray[np.int32]) -> None:
        """Refuses what the engine would refuse, before the state that is there is given up."""
        info = self.info
        if ids.size > info.ctx:
            raise ContextError(f"{ids.size} tokens are needed and {info.ctx} of {info.ctx} are available; "
                               "shorten the input or open the model with a larger ctx")
        bad = np.flatnonzero((ids < 0) | (ids >= info.vocab_size))
        if bad.size:
            raise UsageError(f"token {bad[0]} has id {ids[bad[0]]}; the vocabulary has {info.vocab_size}")

    def _run(self, ids: NDArray[np.int32], params: GenerateParams, keep: bool, hand_over: bool):
        """Generator: yields tokens (when `hand_over`), is sent False to stop, returns the
        Generation."""
        engine = self._engine
        lib = engine.lib
        generated: list[int] = []
        texts: list[str] = []

        def function(exchange: Callable[[Any], Any]) -> Generation:
            failures: list[BaseException] = []

            def on_token(_user: Any, raw: Any) -> int:
                # Runs on the worker thread inside C: nothing may be raised from here.
                try:
                    token = raw.contents
                    if token.id >= 0:  # negative: only text that was held back until the end
                        generated.append(token.id)
                    if token.text_len:
                        texts.append(ctypes.string_at(token.text, token.text_len).decode("utf-8"))
                    if not hand_over:
                        return 0
                    answer = exchange(Token.from_c(token))
                    return 1 if answer is STOP or answer is False else 0
                except BaseException as failure:
                    failures.append(failure)
                    return 1

            session = engine.session_handle()
            if not keep:
                lib.hr_session_reset(session)
            error = _abi.hr_error()
            out = _abi.hr_generation(size=ctypes.sizeof(_abi.hr_generation))
            status = lib.hr_generate(session, ids_pointer(ids), ids.size, ctypes.byref(params.raw),
                                     _abi.hr_token_fn(on_token), None, ctypes.byref(out),
                                     ctypes.byref(error))
            if failures:
                raise failures[0]
            check(status, error)
            return Generation(
                text="".join(texts), ids=generated, finish_reason=FINISH_REASONS[out.finish],
                stats=Stats.from_c(out.stats),
                stop_id=out.stop_id if out.stop_id >= 0 else None,
                stop_string=params.stop[out.stop_string] if out.stop_string >= 0 else None)

        engine.check_turn()
        with engine.turn:
            engine.owner = threading.get_ident()
            call = Call(function, engine.cancel)
            try:
                engine.call = call
                engine.check_open()
                engine.worker.submit(call)
                while (event := call.next_event()) is not DONE:
                    call.answer((yield event))
            finally:
                call.stop(engine.worker)
                engine.call = None
                engine.owner = None
            if engine.closed:
                raise UsageError("the model was closed while it was generating")
            return call.result()


