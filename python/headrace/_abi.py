"""The C interface, declared for ctypes.

One entry for each function, struct and constant of ``include/headrace.h``; a test parses the
header and proves that the two agree. Nothing here interprets anything.

The shared library is looked for beside this file (an installed package) and then, for use of a
checkout without installing, in its ``build/`` directory. :func:`use_library` names another one.
"""

from __future__ import annotations

import ctypes as c
import sys
import threading
from pathlib import Path

# ---- constants ---------------------------------------------------------------------------------

HR_VERSION_MAJOR, HR_VERSION_MINOR, HR_VERSION_PATCH = 0, 1, 0

HR_OK = 0
HR_ERR_USAGE = 1
HR_ERR_FORMAT = 2
HR_ERR_MEMORY = 3
HR_ERR_IO = 4
HR_ERR_CONTEXT = 5
HR_ERR_CANCELLED = 6
HR_ERR_NUMERIC = 7
HR_ERR_UNSUPPORTED = 8

HR_VERIFY_FIRST, HR_VERIFY_ALWAYS, HR_VERIFY_OFF = 0, 1, 2
HR_CACHE_AUTO, HR_CACHE_LRU, HR_CACHE_LFU = 0, 1, 2
HR_LOCK_AUTO, HR_LOCK_ON, HR_LOCK_OFF = 0, 1, 2
HR_LOGITS_NONE, HR_LOGITS_LAST, HR_LOGITS_ALL = 0, 1, 2
HR_FINISH_STOP = 0
HR_FINISH_LENGTH = 1
HR_FINISH_CONTEXT = 2
HR_FINISH_CANCELLED = 3
HR_FINISH_ERROR = 4
HR_EFFORT_GREEDY, HR_EFFORT_DEFAULT, HR_EFFORT_HIGH = 0, 1, 2
HR_LIMIT_DISK, HR_LIMIT_MEMORY, HR_LIMIT_COMPUTE = 0, 1, 2
HR_READY, HR_WARN, HR_NO = 0, 1, 2
HR_LEVER_RAM, HR_LEVER_FASTER_DRIVE, HR_LEVER_SECOND_DRIVE, HR_LEVER_CODEC, HR_LEVER_THREADS = 0, 1, 2, 3, 4
HR_LEVERS = 5
HR_BENCH_CODEC, HR_BENCH_OPERATION, HR_BENCH_READ, HR_BENCH_PEAK = 0, 1, 2, 3

# ---- structs -----------------------------------------------------------------------------------

_u32, _u64, _i32 = c.c_uint32, c.c_uint64, c.c_int32


class hr_error(c.Structure):
    _fields_ = [("code", _i32), ("detail", c.c_char * 1020)]


class hr_model_params(c.Structure):
    _fields_ = [
        ("size", c.c_size_t),
        ("ram", _u64),
        ("ctx", _u32),
        ("threads", _u32),
        ("io_threads", _u32),
        ("chunk", _u32),
        ("max_sessions", _u32),
        ("cache_policy", _i32),
        ("verify", _i32),
        ("direct", _i32),
        ("isa", c.c_char * 16),
        ("shuffle_reads", _u32),
        ("reserved", _u32),
        ("drives", c.POINTER(c.c_char_p)),
        ("drive_count", _u32),
        ("read_ahead", _i32),
        ("usage", c.c_char_p),
        ("lock", _i32),
        ("reserved2", _u32),
    ]


class hr_model_info(c.Structure):
    _fields_ = [
        ("size", c.c_size_t),
        ("vocab_size", _u32),
        ("hidden_size", _u32),
        ("layers", _u32),
        ("moe_layers", _u32),
        ("experts", _u32),
        ("top_k", _u32),
        ("ctx", _u32),
        ("max_position", _u32),
        ("threads", _u32),
        ("io_threads", _u32),
        ("chunk", _u32),
        ("has_tokenizer", _u32),
        ("stop_count", _u32),
        ("stop_ids", _i32 * 16),
        ("parameters", _u64),
        ("trunk_bytes", _u64),
        ("expert_bytes", _u64),
        ("record_bytes", _u64),
        ("container_bytes", _u64),
        ("name", c.c_char * 64),
        ("isa", c.c_char * 16),
        ("io_mode", c.c_char * 48),
        ("trunk_codec", c.c_char * 16),
        ("expert_codec", c.c_char * 16),
        ("container_sha256", c.c_char * 65),
        ("drives", _u32),
        ("expert_activations", _u32),
        ("trunk_locked", _u32),
    ]


class hr_plan_result(c.Structure):
    _fields_ = [
        ("size", c.c_size_t),
        ("trunk", _u64),
        ("state", _u64),
        ("scratch", _u64),
        ("io", _u64),
        ("overhead", _u64),
        ("cache", _u64),
        ("total", _u64),
        ("floor", _u64),
        ("recommended", _u64),
        ("ram", _u64),
        ("available", _u64),
        ("record_bytes", _u64),
        ("working_set", _u64),
        ("bytes_per_token_cold", _u64),
        ("cache_slots", _u32),
        ("total_experts", _u32),
        ("ctx", _u32),
        ("chunk", _u32),
        ("fits", _u32),
        ("reserved", _u32),
        ("trunk_per_token", _u64),
        ("experts_per_token", _u64),
        ("state_per_token", _u64),
        ("state_per_position", _u64),
        ("layers", _u32),
        ("moe_layers", _u32),
        ("experts", _u32),
        ("top_k", _u32),
        ("trunk_rows", _u32),
        ("trunk_cols", _u32),
        ("expert_width", _u32),
        ("expert_inner", _u32),
        ("threads", _u32),
        ("io_threads", _u32),
        ("has_tokenizer", _u32),
        ("expert_activations", _u32),
        ("trunk_codec", c.c_char * 16),
        ("expert_codec", c.c_char * 16),
        ("shared_per_token", _u64),
    ]


class hr_stats(c.Structure):
    _fields_ = [
        ("size", c.c_size_t),
        ("tokens_prefilled", _u64),
        ("tokens_decoded", _u64),
        ("hits", _u64),
        ("misses", _u64),
        ("reads", _u64),
        ("bytes_read", _u64),
        ("trunk_bytes_read", _u64),
        ("read_retries", _u64),
        ("records_verified", _u64),
        ("evictions", _u64),
        ("transient_reads", _u64),
        ("leases", _u64),
        ("cache_slots", _u64),
        ("cache_used", _u64),
        ("cache_bytes", _u64),
        ("memory_used", _u64),
        ("memory_peak", _u64),
        ("memory_limit", _u64),
        ("seconds_prefill", c.c_double),
        ("seconds_decode", c.c_double),
        ("seconds_waiting", c.c_double),
        ("seconds_compute", c.c_double),
        ("seconds_other", c.c_double),
        ("read_fallbacks", _u64),
        ("read_ahead_issued", _u64),
        ("read_ahead_used", _u64),
        ("read_ahead_wasted", _u64),
        ("read_ahead_cancelled", _u64),
        ("read_ahead_bytes", _u64),
    ]


class hr_drive_info(c.Structure):
    _fields_ = [
        ("size", c.c_size_t),
        ("reads", _u64),
        ("bytes_read", _u64),
        ("failures", _u64),
        ("seconds_reading", c.c_double),
        ("probed", c.c_double),
        ("banks", _u32),
        ("in_flight", _u32),
        ("left_out", _u32),
        ("io_mode", c.c_char * 16),
        ("path", c.c_char * 512),
    ]


class hr_token(c.Structure):
    # bytes and text are void pointers: ctypes would cut a char pointer at its first zero byte.
    _fields_ = [
        ("size", c.c_size_t),
        ("id", _i32),
        ("index", _u32),
        ("bytes", c.c_void_p),
        ("bytes_len", c.c_size_t),
        ("text", c.c_void_p),
        ("text_len", c.c_size_t),
        ("logprob", c.c_float),
        ("reserved", _u32),
        ("stats", c.POINTER(hr_stats)),
    ]


class hr_generate_params(c.Structure):
    _fields_ = [
        ("size", c.c_size_t),
        ("max_tokens", _u32),
        ("temperature", c.c_float),
        ("top_k", _u32),
        ("top_p", c.c_float),
        ("min_p", c.c_float),
        ("repetition_penalty", c.c_float),
        ("ignore_stop_ids", _u32),
        ("seed", _u64),
        ("stop_ids", c.POINTER(_i32)),
        ("stop_id_count", c.c_size_t),
        ("stop", c.POINTER(c.c_char_p)),
        ("stop_count", c.c_size_t),
    ]


class hr_generation(c.Structure):
    _fields_ = [
        ("size", c.c_size_t),
        ("finish", _i32),
        ("tokens", _u32),
        ("stop_id", _i32),
        ("stop_string", _i32),
        ("stats", hr_stats),
    ]


class hr_quant_params(c.Structure):
    _fields_ = [
        ("size", c.c_size_t),
        ("codec", c.c_char * 16),
        ("effort", _i32),
        ("beam", _u32),
        ("threads", _u32),
        ("reserved", _u32),
        ("seed", _u64),
        ("isa", c.c_char * 16),
    ]


class hr_bench_params(c.Structure):
    _fields_ = [
        ("size", c.c_size_t),
        ("isa", c.c_char * 16),
        ("seconds", c.c_double),
        ("rows", _u32),
        ("cols", _u32),
        ("pool", _u64),
    ]


class hr_bench_row(c.Structure):
    _fields_ = [
        ("size", c.c_size_t),
        ("name", c.c_char * 24),
        ("isa", c.c_char * 16),
        ("kind", _i32),
        ("tokens", _u32),
        ("rows", _u32),
        ("cols", _u32),
        ("repeats", _u32),
        ("reserved", _u32),
        ("weights_per_second", c.c_double),
        ("bytes_per_second", c.c_double),
        ("macs_per_second", c.c_double),
        ("spread", c.c_double),
        ("read_ratio", c.c_double),
        ("read_spread", c.c_double),
        ("peak_ratio", c.c_double),
        ("peak_spread", c.c_double),
        ("seconds", c.c_double),
        ("cache", _u64),
        ("pool", _u64),
        ("memory", _u64),
    ]


class hr_disk_rate(c.Structure):
    _fields_ = [
        ("depth", _u32),
        ("reads", _u32),
        ("bytes_per_second", c.c_double),
        ("lowest", c.c_double),
        ("highest", c.c_double),
        ("seconds_per_read", c.c_double),
    ]


class hr_probe_params(c.Structure):
    _fields_ = [
        ("size", c.c_size_t),
        ("disk_seconds", c.c_double),
        ("compute_seconds", c.c_double),
        ("record_bytes", _u64),
        ("seed", _u64),
        ("pool", _u64),
        ("direct", _i32),
        ("threads", _u32),
        ("isa", c.c_char * 16),
        ("expert_codec", c.c_char * 16),
        ("trunk_codec", c.c_char * 16),
        ("other_codec", c.c_char * 16),
        ("expert_width", _u32),
        ("expert_inner", _u32),
        ("top_k", _u32),
        ("trunk_rows", _u32),
        ("trunk_cols", _u32),
        ("expert_activations", _u32),
    ]


class hr_probe_result(c.Structure):
    _fields_ = [
        ("size", c.c_size_t),
        ("disk", hr_disk_rate * 4),
        ("disk_rates", _u32),
        ("best_depth", _u32),
        ("asked", _u64),
        ("physical", _u64),
        ("accounted", _u32),
        ("cold", _u32),
        ("direct", _u32),
        ("fresh", _u32),
        ("rotational", _u32),
        ("usb", _u32),
        ("network", _u32),
        ("memory", _u32),
        ("filesystem", c.c_char * 24),
        ("device", c.c_char * 40),
        ("memory_rate", c.c_double),
        ("expert_rate", c.c_double),
        ("other_rate", c.c_double),
        ("trunk_rate", c.c_double),
        ("dispatch_seconds", c.c_double),
        ("threads", _u32),
        ("expert_activations", _u32),
        ("physical_memory", _u64),
        ("available", _u64),
        ("cgroup_room", _u64),
        ("memlock", _u64),
        ("swap_used", _u64),
        ("huge_pages", c.c_char * 16),
    ]


class hr_simulate_params(c.Structure):
    _fields_ = [
        ("size", c.c_size_t),
        ("layers", _u32),
        ("experts", _u32),
        ("top_k", _u32),
        ("slots", _u32),
        ("policy", _i32),
        ("prefill", _u32),
        ("chunk", _u32),
        ("warm_up", _u32),
        ("read_ahead", _u32),
        ("guess_ranks", _u32),
        ("guesses", c.POINTER(_i32)),
        ("read_seconds", c.c_double),
        ("layer_seconds", c.c_double),
        ("expert_seconds", c.c_double),
        ("in_flight", _u32),
        ("reserved", _u32),
    ]


class hr_simulate_result(c.Structure):
    _fields_ = [
        ("size", c.c_size_t),
        ("tokens", _u64),
        ("hits", _u64),
        ("misses", _u64),
        ("evictions", _u64),
        ("transient_reads", _u64),
        ("read_ahead_issued", _u64),
        ("read_ahead_used", _u64),
        ("read_ahead_wasted", _u64),
        ("read_ahead_cancelled", _u64),
        ("alone", _u64),
        ("seconds", c.c_double),
        ("seconds_blocked", c.c_double),
        ("seconds_wanted", c.c_double),
    ]


class hr_forecast_params(c.Structure):
    _fields_ = [
        ("size", c.c_size_t),
        ("plan", c.POINTER(hr_plan_result)),
        ("probe", c.POINTER(hr_probe_result)),
        ("hit_rate", c.c_double),
        ("misses", c.POINTER(c.c_double)),
        ("miss_count", _u32),
        ("position", _u32),
        ("other_record_bytes", _u64),
    ]


class hr_forecast_result(c.Structure):
    _fields_ = [
        ("size", c.c_size_t),
        ("tokens_per_second", c.c_double),
        ("low", c.c_double),
        ("high", c.c_double),
        ("hit_rate", c.c_double),
        ("hit_low", c.c_double),
        ("hit_high", c.c_double),
        ("bytes_read", c.c_double),
        ("seconds_disk", c.c_double),
        ("seconds_compute", c.c_double),
        ("lever", c.c_double * 5),
        ("limit", _i32),
        ("best_lever", _i32),
        ("verdict", _i32),
        ("reasons", _u32),
        ("grade", _i32 * 12),
        ("reason", (c.c_char * 224) * 12),
    ]


class hr_sha256(c.Structure):
    _fields_ = [("state", _u32 * 8), ("length", _u64), ("block", c.c_uint8 * 64)]


# ---- functions ---------------------------------------------------------------------------------

# CFUNCTYPE functions take the interpreter lock when C calls them and drop it afterwards.
hr_verify_fn = c.CFUNCTYPE(_i32, c.c_void_p, _i32, c.c_char_p, _u64, _u64)
hr_token_fn = c.CFUNCTYPE(_i32, c.c_void_p, c.POINTER(hr_token))
hr_bench_fn = c.CFUNCTYPE(_i32, c.c_void_p, c.POINTER(hr_bench_row))
hr_moe_fn = c.CFUNCTYPE(None, c.c_void_p, _u32, _u32, _u32, _u32, c.POINTER(c.c_float),
                        c.POINTER(_i32), c.POINTER(c.c_float))
hr_guess_fn = c.CFUNCTYPE(None, c.c_void_p, _u32, _u32, _u32, c.POINTER(_i32))

_model_p = _session_p = c.c_void_p
_error_p = c.POINTER(hr_error)
_ids_p = c.POINTER(_i32)
_float_p = c.POINTER(c.c_float)
_size_p = c.POINTER(c.c_size_t)
_quant_p = c.POINTER(hr_quant_params)
_double_p = c.POINTER(c.c_double)

#: name -> (result, arguments), exactly as in the header.
FUNCTIONS: dict[str, tuple[object, list[object]]] = {
    "hr_status_name": (c.c_char_p, [_i32]),
    "hr_version": (c.c_char_p, []),
    "hr_isa_name": (c.c_char_p, [_u32]),
    "hr_model_params_init": (None, [c.POINTER(hr_model_params)]),
    "hr_model_open": (c.c_int, [c.c_char_p, c.POINTER(hr_model_params), c.POINTER(_model_p), _error_p]),
    "hr_model_set_ram": (c.c_int, [_model_p, _u64, _error_p]),
    "hr_model_save_usage": (c.c_int, [_model_p, c.c_char_p, _error_p]),
    "hr_model_close": (None, [_model_p]),
    "hr_model_get_info": (c.c_int, [_model_p, c.POINTER(hr_model_info), _error_p]),
    "hr_plan": (c.c_int, [c.c_char_p, c.POINTER(hr_model_params), c.POINTER(hr_plan_result), _error_p]),
    "hr_plan_manifest": (
        c.c_int,
        [c.c_char_p, c.c_size_t, c.POINTER(hr_model_params), c.POINTER(hr_plan_result), _error_p],
    ),
    "hr_verify": (c.c_int, [c.c_char_p, hr_verify_fn, c.c_void_p, _error_p]),
    "hr_verify_drives": (c.c_int, [c.c_char_p, c.POINTER(c.c_char_p), _u32, hr_verify_fn, c.c_void_p,
                                   _error_p]),
    "hr_tokenize": (c.c_int, [_model_p, c.c_char_p, c.c_size_t, _i32, _ids_p, c.c_size_t, _size_p, _error_p]),
    "hr_detokenize": (c.c_int, [_model_p, _ids_p, c.c_size_t, c.c_void_p, c.c_size_t, _size_p, _error_p]),
    "hr_session_create": (c.c_int, [_model_p, c.POINTER(_session_p), _error_p]),
    "hr_session_free": (None, [_session_p]),
    "hr_session_reset": (None, [_session_p]),
    "hr_session_position": (_u32, [_session_p]),
    "hr_session_save": (c.c_int, [_session_p, c.c_char_p, _error_p]),
    "hr_session_load": (c.c_int, [_session_p, c.c_char_p, _error_p]),
    "hr_session_fork": (c.c_int, [_session_p, c.POINTER(_session_p), _error_p]),
    "hr_eval": (c.c_int, [_session_p, _ids_p, c.c_size_t, _i32, _float_p, _error_p]),
    "hr_cancel": (None, [_session_p]),
    "hr_session_record_routes": (c.c_int, [_session_p, _u32, _error_p]),
    "hr_session_routes": (c.c_int, [_session_p, c.c_size_t, _ids_p, _float_p, _error_p]),
    "hr_session_tap": (c.c_int, [_session_p, hr_moe_fn, c.c_void_p, _error_p]),
    "hr_session_tap_guesses": (c.c_int, [_session_p, hr_guess_fn, c.c_void_p, _error_p]),
    "hr_generate_params_init": (None, [c.POINTER(hr_generate_params)]),
    "hr_generate": (
        c.c_int,
        [_session_p, _ids_p, c.c_size_t, c.POINTER(hr_generate_params), hr_token_fn, c.c_void_p,
         c.POINTER(hr_generation), _error_p],
    ),
    "hr_get_drive": (c.c_int, [_model_p, _u32, c.POINTER(hr_drive_info), _error_p]),
    "hr_get_stats": (c.c_int, [_model_p, c.POINTER(hr_stats), _error_p]),
    "hr_quant_params_init": (None, [_quant_p]),
    "hr_quant_bytes": (c.c_int, [_quant_p, _u32, _u32, c.POINTER(_u64), c.POINTER(_u64), _error_p]),
    "hr_quant_fit": (c.c_int, [_quant_p, _float_p, _u32, _u32, c.c_void_p, _error_p]),
    "hr_quant_encode": (
        c.c_int,
        [_quant_p, c.c_void_p, _float_p, _u32, _u32, _float_p, c.c_void_p, _error_p],
    ),
    "hr_quant_moments_bytes": (_u64, [_u32]),
    "hr_quant_moments": (
        c.c_int,
        [_quant_p, _float_p, _u32, _u32, c.c_double, c.c_void_p, _error_p],
    ),
    "hr_quant_encode_feedback": (
        c.c_int,
        [_quant_p, c.c_void_p, _float_p, _u32, _u32, c.c_void_p, c.c_void_p, _error_p],
    ),
    "hr_quant_decode": (
        c.c_int,
        [_quant_p, c.c_void_p, c.c_void_p, _u32, _u32, _float_p, _error_p],
    ),
    "hr_quant_error": (
        c.c_int,
        [_quant_p, c.c_void_p, c.c_void_p, _float_p, _u32, _u32, _float_p, _double_p, _double_p,
         _error_p],
    ),
    "hr_bench_params_init": (None, [c.POINTER(hr_bench_params)]),
    "hr_bench_kernels": (c.c_int, [c.POINTER(hr_bench_params), hr_bench_fn, c.c_void_p, _error_p]),
    "hr_probe_params_init": (None, [c.POINTER(hr_probe_params), c.POINTER(hr_plan_result)]),
    "hr_probe": (
        c.c_int,
        [c.c_char_p, c.POINTER(hr_probe_params), c.POINTER(hr_probe_result), _error_p],
    ),
    "hr_simulate_params_init": (None, [c.POINTER(hr_simulate_params)]),
    "hr_simulate": (
        c.c_int,
        [c.POINTER(hr_simulate_params), _ids_p, c.c_size_t, c.POINTER(_u64),
         c.POINTER(hr_simulate_result), _error_p],
    ),
    "hr_forecast_params_init": (None, [c.POINTER(hr_forecast_params)]),
    "hr_forecast": (
        c.c_int,
        [c.POINTER(hr_forecast_params), c.POINTER(hr_forecast_result), _error_p],
    ),
    "hr_sha256_init": (None, [c.POINTER(hr_sha256)]),
    "hr_sha256_update": (None, [c.POINTER(hr_sha256), c.c_void_p, c.c_size_t]),
    "hr_sha256_final": (None, [c.POINTER(hr_sha256), c.POINTER(c.c_uint8)]),
    "hr_crc32c": (_u32, [_u32, c.c_void_p, c.c_size_t]),
}


# ---- the library -------------------------------------------------------------------------------

LIBRARY_NAME = "libheadrace.dylib" if sys.platform == "darwin" else "libheadrace.so"
_lock = threading.Lock()
_library: c.CDLL | None = None


def _candidates() -> list[Path]:
    package = Path(__file__).resolve().parent
    return [package / LIBRARY_NAME, package.parents[1] / "build" / LIBRARY_NAME]


def use_library(path: str | Path) -> None:
    """Loads the shared library at `path` from now on. Models that are open keep theirs.

    Raises OSError when it cannot be loaded, AttributeError when it lacks a function.
    """
    global _library
    loaded = _declare(c.CDLL(str(path)))
    with _lock:
        _library = loaded


def library() -> c.CDLL:
    """The library, loaded at the first call.

    Raises ImportError when there is none.
    """
    global _library
    with _lock:
        if _library is None:
            for path in _candidates():
                if path.exists():
                    _library = _declare(c.CDLL(str(path)))
                    break
            else:
                looked = ", ".join(str(p) for p in _candidates())
                raise ImportError(
                    f"{LIBRARY_NAME} was not found; looked at {looked}. Install the package "
                    "(pip install .), build the checkout (meson setup build && meson compile -C "
                    "build), or name the file with headrace.use_library(path)."
                )
        return _library


def _declare(loaded: c.CDLL) -> c.CDLL:
    # CDLL drops the interpreter lock for the length of every call.
    for name, (result, arguments) in FUNCTIONS.items():
        function = getattr(loaded, name)
        function.restype = result
        function.argtypes = arguments
    return loaded
