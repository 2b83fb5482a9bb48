"""hr_generate on the bundled model: finish reasons, stop strings, seeds, text, bookkeeping."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

OK, USAGE, CONTEXT, UNSUPPORTED = 0, 1, 5, 8
STOP, LENGTH, FULL, CANCELLED, ERROR = range(5)
LAST, ALL = 1, 2
CTX = 96
PROMPT = "The captain stood upon the deck and looked at the sea, and"


@dataclass
class Result:
    status: int
    finish: int
    tokens: int
    stop_id: int
    stop_string: int
    stats: object
    detail: str
    ids: list[int] = field(default_factory=list)
    raw: list[bytes] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.texts)


class Api:
    """The public functions on one open model with one session."""

    def __init__(self, lib, path, ctx: int = CTX):
        self.ffi, self.c = lib
        self.err = self.ffi.new("hr_error *")
        params = self.ffi.new("hr_model_params *")
        self.c.hr_model_params_init(params)
        params.ctx, params.threads = ctx, 2
        out = self.ffi.new("hr_model **")
        assert self.c.hr_model_open(str(path).encode(), params, out, self.err) == OK, self.detail
        self.model = out[0]
        out = self.ffi.new("hr_session **")
        assert self.c.hr_session_create(self.model, out, self.err) == OK, self.detail
        self.session = out[0]
        info = self.ffi.new("hr_model_info *", {"size": self.ffi.sizeof("hr_model_info")})
        assert self.c.hr_model_get_info(self.model, info, self.err) == OK
        self.vocab = info.vocab_size
        self.stop_ids = list(info.stop_ids[0:info.stop_count])

    def close(self) -> None:
        self.c.hr_session_free(self.session)
        self.c.hr_model_close(self.model)

    @property
    def detail(self) -> str:
        return self.ffi.string(self.err.detail).decode()

    @property
    def position(self) -> int:
        return self.c.hr_session_position(self.session)

    def reset(self) -> "Api":
        self.c.hr_session_reset(self.session)
        return self

    def tokenize(self, text: str, special: bool = False) -> list[int]:
        data = text.encode()
        ids = self.ffi.new("int32_t[]", len(data) + 16)
        count = self.ffi.new("size_t *")
        assert self.c.hr_tokenize(self.model, data, len(data), special, ids, len(ids), count,
                                  self.err) == OK, self.detail
        return list(ids[0:count[0]])

    def detokenize(self, ids: list[int]) -> bytes:
        out = self.ffi.new("char[]", 64 * len(ids) + 16)
        count = self.ffi.new("size_t *")
        assert self.c.hr_detokenize(self.model, self.ffi.new("int32_t[]", ids), len(ids), out,
                                    len(out), count, self.err) == OK, self.detail
        return self.ffi.buffer(out, count[0])[:]

    def eval(self, ids: list[int], which: int = LAST) -> np.ndarray:
        """float32 [vocab] or [n, vocab]"""
        rows = len(ids) if which == ALL else 1
        logits = np.zeros((rows, self.vocab), np.float32)
        status = self.c.hr_eval(self.session, self.ffi.new("int32_t[]", ids), len(ids), which,
                                self.ffi.from_buffer("float[]", logits), self.err)
        assert status == OK, self.detail
        return logits

    def generate(self, prompt: str | list[int], on_token=None, stop=(), stop_ids=(),
                 **settings) -> Result:
        ids = self.tokenize(prompt) if isinstance(prompt, str) else list(prompt)
        ffi = self.ffi
        params = ffi.new("hr_generate_params *")
        self.c.hr_generate_params_init(params)
        for name, value in settings.items():
            setattr(params, name, value)
        strings = [ffi.new("char[]", s if isinstance(s, bytes) else s.encode()) for s in stop]
        stop_list = ffi.new("char *[]", strings)
        stop_id_list = ffi.new("int32_t[]", list(stop_ids))
        params.stop = ffi.cast("const char *const *", stop_list) if strings else ffi.NULL
        params.stop_count = len(strings)
        params.stop_ids = stop_id_list if len(stop_ids) else ffi.NULL
        params.stop_id_count = len(stop_ids)
        result = Result(0, -1, 0, 0, 0, None, "")
        faults: list[BaseException] = []

        @ffi.callback("hr_token_fn", error=1)
        def callback(_user, token):
            try:
                result.texts.append(ffi.buffer(token.text, token.text_len)[:].decode("utf-8"))
                if token.id < 0:  # held-back text without a token
                    assert token.bytes_len == 0 and token.text_len > 0
                    return 0
                assert token.index == len(result.ids)
                result.ids.append(token.id)
                result.raw.append(ffi.buffer(token.bytes, token.bytes_len)[:])
                result.logprobs.append(token.logprob)
                return int(on_token(token) or 0) if on_token else 0
            except BaseException as fault:
                faults.append(fault)
                return 1

        out = ffi.new("hr_generation *", {"size": ffi.sizeof("hr_generation")})
        result.status = self.c.hr_generate(
            self.session, ffi.new("int32_t[]", ids), len(ids), params, callback, ffi.NULL, out,
            self.err)
        assert not faults, faults
        result.finish, result.tokens = out.finish, out.tokens
        result.stop_id, result.stop_string = out.stop_id, out.stop_string
        result.stats = out.stats
        result.detail = self.detail if result.status != OK else ""
        assert result.status != OK or result.tokens == len(result.ids)
        if result.status == OK:
            assert out.stats.leases == 0
        return result


@pytest.fixture(scope="module")
def opened(lib, model_dir):
    api = Api(lib, model_dir)
    yield api
    api.close()


@pytest.fixture
def api(opened):
    return opened.reset()


# ---- finish reasons ---------------------------------------------------------------------------

def test_length(api):
    r = api.generate(PROMPT, max_tokens=7)
    assert (r.status, r.finish, r.tokens, r.stop_id, r.stop_string) == (OK, LENGTH, 7, -1, -1)
    assert api.position == len(api.tokenize(PROMPT)) + 6  # the last one waits


def test_stop_id_is_not_reported(api):
    free = api.generate(PROMPT, max_tokens=12)
    at = next(i for i in range(3, 12) if free.ids[i] not in free.ids[:i])
    api.reset()
    r = api.generate(PROMPT, max_tokens=12, stop_ids=[free.ids[at]])
    assert (r.finish, r.stop_id, r.tokens) == (STOP, free.ids[at], at)
    assert r.ids == free.ids[:at]
    # nothing waits: the session stands behind the last reported token
    assert api.position == len(api.tokenize(PROMPT)) + at


def test_ignore_stop_ids_is_for_the_models_own(api):
    own = api.stop_ids
    assert own
    free = api.generate(PROMPT, max_tokens=4)
    api.reset()
    r = api.generate(PROMPT, max_tokens=4, stop_ids=[free.ids[2]], ignore_stop_ids=1)
    assert (r.finish, r.stop_id) == (STOP, free.ids[2])


def test_context_full(api):
    ids = api.tokenize(PROMPT)
    r = api.generate(ids, ignore_stop_ids=1)
    assert (r.finish, r.tokens) == (FULL, CTX - len(ids) + 1)
    assert api.position == CTX
    again = api.generate([], max_tokens=1)
    assert again.status == CONTEXT


@pytest.mark.parametrize("excess", [1, 2, 9 * CTX])
def test_prompt_beyond_the_context_is_refused_untouched(api, excess):
    before = api.eval(api.tokenize("It was"))
    at = api.position
    n = CTX - at + excess
    r = api.generate([5] * n)
    assert (r.status, r.finish, r.ids) == (CONTEXT, ERROR, [])
    assert str(n) in r.detail and str(CTX - at) in r.detail
    assert api.position == at
    fresh = api.generate([], max_tokens=1)
    assert fresh.ids == [int(np.argmax(before[0]))]


@pytest.mark.parametrize("short", [0, 1])
def test_prompt_up_to_the_context_is_accepted(api, short):
    r = api.generate([5] * (CTX - short), ignore_stop_ids=1)
    assert (r.status, r.finish, r.tokens) == (OK, FULL, 1 + short)


@pytest.mark.parametrize("at", [0, 1, 5])
def test_callback_stops_at_a_token(api, at):
    free = api.generate(PROMPT, max_tokens=8)
    api.reset()
    r = api.generate(PROMPT, on_token=lambda t: t.index == at, max_tokens=8)
    assert (r.status, r.finish, r.tokens) == (OK, CANCELLED, at + 1)
    more = api.generate([], max_tokens=7 - at)
    assert r.ids + more.ids == free.ids


def test_cancel_from_the_callback_stops_within_one_token(api):
    def cancel(token):
        if token.index == 3:
            api.c.hr_cancel(api.session)

    r = api.generate(PROMPT, on_token=cancel, max_tokens=20)
    assert (r.status, r.finish, r.tokens) == (OK, CANCELLED, 4)
    assert api.generate([], max_tokens=2).finish == LENGTH


def test_cancel_before_the_call_is_forgotten(api):
    api.c.hr_cancel(api.session)
    assert api.generate(PROMPT, max_tokens=2).finish == LENGTH


# ---- stop strings and text --------------------------------------------------------------------

def test_stop_string_inside_a_token(api):
    free = api.generate(PROMPT, max_tokens=20)
    for start, length in [(4, 3), (9, 1), (12, 9)]:
        stop = free.text[start:start + length]
        api.reset()
        r = api.generate(PROMPT, max_tokens=20, stop=["never to be seen", stop])
        assert (r.status, r.finish, r.stop_string, r.stop_id) == (OK, STOP, 1, -1)
        assert r.text == free.text[: free.text.index(stop)]
        assert r.ids == free.ids[: r.tokens]
        assert stop in api.detokenize(r.ids).decode()


def test_what_only_looks_like_a_stop_string_comes_out(api):
    free = api.generate(PROMPT, max_tokens=20)
    api.reset()
    stops = [free.text[i:i + 4] + "\x01" for i in range(0, 16, 3)]
    r = api.generate(PROMPT, max_tokens=20, stop=stops)
    assert (r.finish, r.text, r.ids) == (LENGTH, free.text, free.ids)


def test_held_text_comes_out_when_a_stop_id_ends_it(api):
    free = api.generate(PROMPT, max_tokens=12)
    at = next(i for i in range(3, 12) if free.ids[i] not in free.ids[:i])
    before = api.detokenize(free.ids[:at]).decode()
    api.reset()
    r = api.generate(PROMPT, stop_ids=[free.ids[at]], stop=[before[-2:] + "\x01"])
    assert r.finish == STOP and r.text == before


def test_texts_concatenate_to_the_decoded_ids(api):
    """High temperature draws tokens that are parts of characters and lone bytes."""
    for seed in range(6):
        api.reset()
        r = api.generate(PROMPT, temperature=50.0, seed=seed, max_tokens=60, ignore_stop_ids=1)
        assert b"".join(r.raw) == api.detokenize(r.ids)
        assert r.text == b"".join(r.raw).decode("utf-8", errors="replace")


@pytest.mark.parametrize("stop", [[b""], [b"x" * 257], [b"\xff"], [b"a"] * 17])
def test_bad_stop_strings_leave_the_session_untouched(api, stop):
    r = api.generate(PROMPT, stop=stop)
    assert (r.status, r.finish) == (USAGE, ERROR)
    assert api.position == 0


# ---- sampling ---------------------------------------------------------------------------------

SAMPLED = dict(temperature=0.8, top_k=40, top_p=0.95, max_tokens=24)


def test_same_seed_same_text(api):
    first = api.generate(PROMPT, seed=7, **SAMPLED)
    assert api.reset().generate(PROMPT, seed=7, **SAMPLED).ids == first.ids
    assert api.reset().generate(PROMPT, seed=8, **SAMPLED).ids != first.ids


def test_greedy_is_the_argmax_of_eval(api):
    r = api.generate(PROMPT, max_tokens=10)
    ids = api.tokenize(PROMPT)
    logits = api.reset().eval(ids + r.ids[:-1], ALL)[len(ids) - 1:]
    assert r.ids == np.argmax(logits, axis=1).tolist()
    wide = logits.astype(np.float64)
    top = wide.max(axis=1)
    expected = -np.log(np.exp(wide - top[:, None]).sum(axis=1))
    np.testing.assert_allclose(r.logprobs, expected, atol=1e-5)


def test_max_tokens_bounds_a_loop(api):
    """The bundled model repeats itself when greedy: only max_tokens ends it."""
    assert api.generate(PROMPT, max_tokens=60).finish == LENGTH


@pytest.mark.parametrize("settings", [
    {"temperature": -1.0}, {"temperature": float("nan")}, {"top_p": 0.0}, {"top_p": 1.5},
    {"min_p": 1.0}, {"repetition_penalty": 0.0},
])
def test_bad_parameters_are_named(api, settings):
    r = api.generate(PROMPT, **settings)
    assert r.status == USAGE
    assert next(iter(settings)) in r.detail
    assert api.position == 0


@pytest.mark.parametrize("ids", [[1, -1], [1, 4096], [2**31 - 1]])
def test_ids_outside_the_vocabulary(api, ids):
    assert api.generate(ids).status == USAGE
    assert api.position == 0
    assert api.generate([1], stop_ids=ids[-1:]).status == USAGE


def test_nothing_to_sample_from(api):
    assert api.generate([]).status == USAGE


# ---- continuing -------------------------------------------------------------------------------

def test_two_calls_equal_one(api):
    whole = api.generate(PROMPT, max_tokens=16)
    first = api.reset().generate(PROMPT, max_tokens=9)
    second = api.generate([], max_tokens=7)
    assert first.ids + second.ids == whole.ids
    assert second.stats.tokens_prefilled == 0
    assert second.stats.tokens_decoded == 7  # the one that waited, and all but its own last


def test_the_waiting_token_comes_before_the_next_prompt(api):
    first = api.generate(PROMPT, max_tokens=5)
    more = api.tokenize(" and then")
    second = api.generate(more, max_tokens=5)
    ids = api.tokenize(PROMPT) + first.ids + more
    assert api.reset().generate(ids, max_tokens=5).ids == second.ids


def test_eval_after_generate_evaluates_the_waiting_token(api):
    first = api.generate(PROMPT, max_tokens=5)
    after = api.eval([17])
    ids = api.tokenize(PROMPT) + first.ids + [17]
    assert np.array_equal(api.reset().eval(ids), after)


@pytest.mark.parametrize(("ids", "status"), [([5, 1 << 30], USAGE), ([], USAGE), ([5] * CTX, CONTEXT)])
def test_a_refused_eval_leaves_the_waiting_token(api, ids, status):
    """hr_eval is refused before it evaluates the token that the last generation reported."""
    done = api.reset().generate("The", max_tokens=4)
    before = api.position
    assert api.c.hr_eval(api.session, api.ffi.new("int32_t[]", ids), len(ids), LAST, api.ffi.NULL,
                         api.err) == status
    assert api.position == before
    after = api.eval([9])
    assert np.array_equal(after, api.reset().eval(api.tokenize("The") + done.ids + [9]))


def test_routes_without_room_evaluate_nothing(api):
    api.reset().generate("The", max_tokens=2)
    before = api.position
    assert api.c.hr_session_record_routes(api.session, 2, api.err) == OK
    try:
        prompt = api.ffi.new("int32_t[]", [5, 6, 7])
        for status in (api.c.hr_eval(api.session, prompt, 3, LAST, api.ffi.NULL, api.err),
                       api.c.hr_generate(api.session, prompt, 3, api.ffi.NULL, api.ffi.NULL,
                                         api.ffi.NULL, api.ffi.NULL, api.err)):
            assert status == USAGE and "room was taken for 2" in api.detail
            assert api.position == before
    finally:
        api.c.hr_session_record_routes(api.session, 0, api.err)


def test_statistics_are_of_this_generation(api):
    ids = api.tokenize(PROMPT)
    for _ in range(2):
        r = api.reset().generate(ids, max_tokens=6)
        assert r.stats.tokens_prefilled == len(ids)
        assert r.stats.tokens_decoded == 5
        assert r.stats.hits + r.stats.misses > 0
        assert r.stats.seconds_prefill > 0 and r.stats.seconds_decode > 0
        assert r.stats.memory_used <= r.stats.memory_peak <= r.stats.memory_limit


def test_memory_is_given_back(api):
    before = api.generate(PROMPT, max_tokens=2, temperature=1.0, top_p=0.9,
                          repetition_penalty=1.1).stats.memory_used
    for _ in range(3):
        assert api.reset().generate(PROMPT, max_tokens=2).stats.memory_used == before


# ---- without a tokenizer ----------------------------------------------------------------------

def test_ids_only_container(lib, fixture_models):
    api = Api(lib, fixture_models("qwen3_5_moe"), ctx=32)
    r = api.generate([1, 2, 3], max_tokens=4, ignore_stop_ids=1)
    assert (r.status, r.tokens, r.text, b"".join(r.raw)) == (OK, 4, "", b"")
    assert api.reset().generate([1, 2, 3], stop=["x"]).status == UNSUPPORTED
    api.close()
