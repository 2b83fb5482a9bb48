/*
 * headrace.h - the public interface of Headrace, an engine that runs
 * Mixture-of-Experts language models far larger than RAM.
 *
 * This header is the contract. What it does not promise, nobody may rely on.
 *
 * General rules
 *   - Every function that can fail returns hr_status and fills *err (err may be
 *     NULL). The library never prints, never calls exit(), installs no signal
 *     handler and reads no environment variable.
 *   - Strings are UTF-8 and NUL-terminated unless a length is given. Paths are
 *     passed to the operating system as they are.
 *   - Parameter structs begin with `size`. Fill them with their _init function,
 *     then change fields. New fields are only ever appended.
 *   - Sizes in bytes are uint64_t; token ids are int32_t; logits are float32.
 *   - Threads: a model may be used by many threads at once. A session belongs to
 *     one thread at a time. hr_cancel may be called from any thread (and from a
 *     signal handler) at any moment. There is no global state.
 *   - Memory: hr_model_open, hr_session_create and hr_session_fork take all that a model and a session
 *     will ever need, and start all threads. From then on hr_eval, hr_generate, hr_session_reset,
 *     hr_session_load, hr_session_routes, hr_detokenize and the calls that only ask allocate, map and
 *     start nothing, on no thread; hr_model_set_ram gives memory back and takes it again in place. What does
 *     allocate, within `ram`: hr_session_record_routes and hr_session_tap_guesses until they are switched
 *     off; until they return hr_tokenize (in proportion to the text), hr_session_save and
 *     hr_model_save_usage (the length of their path; on Windows hr_session_load too).
 *   - Determinism: for one container and one sequence of token ids the logits are
 *     the same bits for every isa, thread count, ram, chunk, direct, verify,
 *     read_ahead, usage and lock setting. See docs/determinism.md.
 */
#ifndef HEADRACE_H
#define HEADRACE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(_WIN32)
#define HR_API __declspec(dllexport)
#elif defined(__GNUC__)
#define HR_API __attribute__((visibility("default")))
#else
#define HR_API
#endif

#define HR_VERSION_MAJOR 0
#define HR_VERSION_MINOR 1
#define HR_VERSION_PATCH 0

/* Result of a call. Values are stable; new ones may be appended. */
typedef enum hr_status {
    HR_OK = 0,
    HR_ERR_USAGE = 1,     /* an argument is out of range, or the call is not allowed now */
    HR_ERR_FORMAT = 2,    /* a file is not what it should be, or is damaged */
    HR_ERR_MEMORY = 3,    /* the ram budget (or the system) cannot hold it */
    HR_ERR_IO = 4,        /* the operating system refused or failed a file operation */
    HR_ERR_CONTEXT = 5,   /* more tokens than the context holds; nothing was evaluated */
    HR_ERR_CANCELLED = 6, /* hr_cancel was called, or a callback asked to stop an eval */
    HR_ERR_NUMERIC = 7,   /* a NaN or infinity appeared in a layer's output */
    HR_ERR_UNSUPPORTED = 8 /* a valid container that needs something this build lacks */
} hr_status;

/* Filled when a call fails: what, where (file, tensor, layer, offset), what to do. */
typedef struct hr_error {
    int32_t code;      /* an hr_status */
    char detail[1020]; /* one line of UTF-8, NUL-terminated */
} hr_error;

/* A short constant name such as "format"; never NULL. */
HR_API const char *hr_status_name(int32_t code);
/* "major.minor.patch" of the library in use; static storage. */
HR_API const char *hr_version(void);
/* Names of the kernel sets that this CPU can run, best first: index 0, 1, ...; NULL past the
 * last. "reference" is always among them. */
HR_API const char *hr_isa_name(uint32_t index);

/* ---- models ------------------------------------------------------------ */

/* An opened container: immutable, shareable between threads and sessions. */
typedef struct hr_model hr_model;
/* One token timeline on a model: position, key/value and recurrent state. */
typedef struct hr_session hr_session;

/* When expert records are checked against their CRC32C. The record's identity
 * (layer, expert, codec, sizes, expected checksum) is checked on every read. */
enum { HR_VERIFY_FIRST = 0, HR_VERIFY_ALWAYS = 1, HR_VERIFY_OFF = 2 };
/* Which expert leaves the cache. AUTO picks by the ratio of cache to working set. */
enum { HR_CACHE_AUTO = 0, HR_CACHE_LRU = 1, HR_CACHE_LFU = 2 };
/* Whether the trunk is locked in memory, so that it is never paged out. AUTO: where the system allows
 * it (RLIMIT_MEMLOCK, a privilege) and what the model takes fits what was available; else it goes on
 * without. ON: HR_ERR_MEMORY where the system refuses. */
enum { HR_LOCK_AUTO = 0, HR_LOCK_ON = 1, HR_LOCK_OFF = 2 };

typedef struct hr_model_params {
    size_t size;
    /* Hard ceiling in bytes on everything the library allocates for this model and
     * its sessions. 0: three quarters of what is really available (smallest of
     * MemAvailable and the cgroup limits on the path). An hr_model_open with a
     * ram below the floor fails with HR_ERR_MEMORY and names the floor. */
    uint64_t ram;
    uint32_t ctx;          /* tokens a session can hold; 0 = 4096. At most the model's limit */
    uint32_t threads;      /* compute threads, caller included; 0 = physical cores available */
    uint32_t io_threads;   /* reads in flight on each drive; 0 = measured while opening, 2 to 8; 4 where there
                              is too little to measure */
    uint32_t chunk;        /* most tokens evaluated together in prefill; 0 = by memory, at most 512 */
    uint32_t max_sessions; /* sessions alive at once that `ram` must hold; 0 = 1 */
    int32_t cache_policy;  /* HR_CACHE_* ; default HR_CACHE_AUTO */
    int32_t verify;        /* HR_VERIFY_* ; default HR_VERIFY_FIRST */
    int32_t direct;        /* 1 = bypass the page cache where the file system can (default), 0 = never */
    char isa[16];          /* "auto" (default) or a name that hr_isa_name gives */
    /* Testing aid: seed that shuffles the order in which finished reads are
     * delivered. 0 = off. Never changes a bit of any result. */
    uint32_t shuffle_reads;
    uint32_t reserved;
    /* Directories, on other drives, with further copies of bank files (experts-*.bin, same names) or with
     * some that the container's own lacks. A record is read from the drive that will have it first; when
     * that fails, from another that has it. Only read while opening; at most 7. */
    const char *const *drives;
    uint32_t drive_count;
    /* While a layer computes, read experts that the next layer may want: its router is asked with this
     * layer's input. -1 (default): the six best for a token, as long as that saves time; 0: none; n: the n
     * best. Only in decode. */
    int32_t read_ahead;
    /* A file that hr_model_save_usage wrote for this container; NULL (default): none. What it says was
     * used most begins as warm, and cools down like everything else. Only read while opening. A file
     * that is missing, damaged or of another container is an error. */
    const char *usage;
    int32_t lock;          /* HR_LOCK_* ; default HR_LOCK_AUTO */
    uint32_t reserved2;
} hr_model_params;

HR_API void hr_model_params_init(hr_model_params *params);

/* Opens the container directory `path`. Checks the manifest against
 * manifest.sha256, every description against the files' sizes, the trunk's and
 * tokenizer's checksums; loads the trunk; starts the threads. params may be NULL
 * (defaults). On success *out must be released with hr_model_close. */
HR_API hr_status hr_model_open(const char *path, const hr_model_params *params,
                               hr_model **out, hr_error *err);
/* Waits for no one: every session must have been freed before. NULL is allowed. */
HR_API void hr_model_close(hr_model *model);

/* Lowers the budget of an opened model, or raises it again up to what it was opened with (more
 * counts as that). The expert cache gives or takes the difference: memory goes back to the system
 * at once, of experts that a running call uses as it lets go of them. HR_ERR_MEMORY when `ram` is
 * below what the model takes without a cache; the message names it. Any thread, at any moment. */
HR_API hr_status hr_model_set_ram(hr_model *model, uint64_t ram, hr_error *err);

/* Writes how often each expert was used (formats/usage.md), on top of the counts that the model was
 * opened with; what lies long back counts less and less. Temporary file, fsync, rename; mode 0600:
 * whatever happens, `path` holds the old file or the new one; of several that write it each waits for its
 * turn. HR_ERR_IO where `path` is a device, a pipe or a directory. Any thread, at any moment. */
HR_API hr_status hr_model_save_usage(hr_model *model, const char *path, hr_error *err);

typedef struct hr_model_info {
    size_t size;
    uint32_t vocab_size, hidden_size, layers, moe_layers;
    uint32_t experts;        /* largest number of routed experts in a layer */
    uint32_t top_k;          /* largest number chosen for a token */
    uint32_t ctx;            /* tokens a session holds */
    uint32_t max_position;   /* the model's own limit */
    uint32_t threads, io_threads, chunk;
    uint32_t has_tokenizer;  /* 0 for an ids-only container */
    uint32_t stop_count;     /* number of stop ids */
    int32_t stop_ids[16];
    uint64_t parameters;     /* weights in trunk and experts, padding not counted */
    uint64_t trunk_bytes, expert_bytes, record_bytes, container_bytes;
    char name[64];           /* as recorded by the converter */
    char isa[16];            /* the kernels in use */
    char io_mode[48];        /* "direct", "buffered", or "mixed"; as probed by a real read */
    char trunk_codec[16], expert_codec[16];
    char container_sha256[65]; /* hex SHA-256 of manifest.json */
    uint32_t drives;         /* the container's own directory counts */
    uint32_t expert_activations; /* bits of those that experts meet: 22 or 8; 0 = float32, mixed or no experts */
    uint32_t trunk_locked;   /* 1: the trunk is locked in memory */
} hr_model_info;

/* info->size must be set by the caller to sizeof(hr_model_info). */
HR_API hr_status hr_model_get_info(const hr_model *model, hr_model_info *info, hr_error *err);

/* What a model needs, from the manifest alone (no tensor is read). */
typedef struct hr_plan_result {
    size_t size;
    uint64_t trunk, state, scratch, io, overhead; /* bytes; state and scratch are for max_sessions */
    uint64_t cache;          /* bytes of expert cache that `ram` leaves */
    uint64_t total;          /* the sum; never above ram */
    uint64_t floor;          /* the smallest ram that opens */
    uint64_t recommended;    /* ram that holds the whole model, or the default if that is less */
    uint64_t ram;            /* the budget planned for */
    uint64_t available;      /* usable memory found on this machine */
    uint64_t record_bytes, working_set; /* one expert; layers x top_k experts */
    uint64_t bytes_per_token_cold;      /* read from disk per decoded token, nothing cached */
    uint32_t cache_slots, total_experts;
    uint32_t ctx, chunk, fits, reserved; /* fits: 1 when floor <= ram */
    /* What decoding a token reads from memory, in bytes: resident weights, expert records, recurrent
     * state (written too), and attention state for every token before it. */
    uint64_t trunk_per_token, experts_per_token, state_per_token, state_per_position;
    uint32_t layers, moe_layers, experts, top_k; /* the last two: the largest of a layer */
    uint32_t trunk_rows, trunk_cols;     /* the layers' matrix that is read most */
    uint32_t expert_width, expert_inner; /* of an expert's matrices */
    uint32_t threads, io_threads, has_tokenizer;
    uint32_t expert_activations; /* of expert_codec, as in hr_model_info */
    char trunk_codec[16], expert_codec[16]; /* that hold most bytes */
    uint64_t shared_per_token; /* of trunk_per_token: experts of every token, computed while others are read */
} hr_plan_result;

/* Fills *plan for the container at `path`; fails only when the container is not
 * readable. plan->size must be set by the caller. */
HR_API hr_status hr_plan(const char *path, const hr_model_params *params,
                         hr_plan_result *plan, hr_error *err);

/* The same for a container that does not exist yet, from the manifest that it would have; checksums
 * may be any numbers. Drives count, but need not exist: drives may be NULL. */
HR_API hr_status hr_plan_manifest(const char *manifest, size_t n, const hr_model_params *params,
                                  hr_plan_result *plan, hr_error *err);

/* Reads every byte of every file and checks it, then whether the description makes a
 * model (and the tokenizer is one). `report` (may be NULL) is called
 * for every fault found (fault = 1, text names file, layer, expert, offset) and
 * for progress (fault = 0, done and total in bytes); a non-zero return stops.
 * Returns HR_OK when no fault was found, HR_ERR_FORMAT when some were, HR_ERR_IO when
 * a file could not be read (the others are checked all the same), HR_ERR_UNSUPPORTED when every
 * byte is right and this build does not know the model. */
typedef int32_t (*hr_verify_fn)(void *user, int32_t fault, const char *text,
                                uint64_t done, uint64_t total);
HR_API hr_status hr_verify(const char *path, hr_verify_fn report, void *user, hr_error *err);
/* The same with the drives of hr_model_params: every copy of every bank is checked. A fault of one begins
 * with its directory. A bank that the container's own lacks is no fault when a drive has it; a drive without
 * any bank is one. */
HR_API hr_status hr_verify_drives(const char *path, const char *const *drives, uint32_t drive_count,
                                  hr_verify_fn report, void *user, hr_error *err);

/* ---- text -------------------------------------------------------------- */

/* Encodes n bytes of UTF-8. special = 0: control tokens are never produced,
 * whatever the text contains; special = 1: their spellings are recognised.
 * Writes at most `capacity` ids and always the full count to *count; when it
 * does not fit, returns HR_ERR_USAGE and writes no id (call again). Invalid
 * UTF-8 is encoded as U+FFFD per maximal ill-formed sequence. Ids-only
 * containers return HR_ERR_UNSUPPORTED. */
HR_API hr_status hr_tokenize(const hr_model *model, const char *text, size_t n, int32_t special,
                             int32_t *ids, size_t capacity, size_t *count, hr_error *err);
/* The raw bytes of ids, which need not be valid UTF-8. Same capacity rule. */
HR_API hr_status hr_detokenize(const hr_model *model, const int32_t *ids, size_t n,
                               char *bytes, size_t capacity, size_t *count, hr_error *err);

/* ---- sessions ---------------------------------------------------------- */

/* HR_ERR_MEMORY when max_sessions sessions are alive. */
HR_API hr_status hr_session_create(hr_model *model, hr_session **out, hr_error *err);
HR_API void hr_session_free(hr_session *session); /* NULL is allowed */
/* Back to position 0. Also clears a failure that poisoned the session. */
HR_API void hr_session_reset(hr_session *session);
/* Tokens evaluated so far. */
HR_API uint32_t hr_session_position(const hr_session *session);
/* Writes the whole state to `path`, as hr_model_save_usage writes its file. */
HR_API hr_status hr_session_save(const hr_session *session, const char *path, hr_error *err);
/* Replaces the state by the saved one. On any error (missing, damaged, from
 * another container, too long for ctx) the session is exactly as before; only a drive
 * that fails while the state, already found sound, is read a second time poisons it. */
HR_API hr_status hr_session_load(hr_session *session, const char *path, hr_error *err);
/* A new session with a copy of the state; counts against max_sessions. */
HR_API hr_status hr_session_fork(const hr_session *session, hr_session **out, hr_error *err);

enum { HR_LOGITS_NONE = 0, HR_LOGITS_LAST = 1, HR_LOGITS_ALL = 2 };

/* Appends n ids and evaluates them. `logits` receives float32 [vocab_size] (LAST),
 * [n][vocab_size] (ALL) or nothing (NONE; may be NULL). HR_ERR_USAGE for an id
 * outside the vocabulary, HR_ERR_CONTEXT when position + n (and a token that hr_generate
 * left) > ctx: both leave the session untouched. Any other error poisons the session: the next eval returns
 * HR_ERR_USAGE until hr_session_reset or a successful hr_session_load. */
HR_API hr_status hr_eval(hr_session *session, const int32_t *ids, size_t n, int32_t which,
                         float *logits, hr_error *err);

/* Asks a running hr_eval or hr_generate on this session to stop: within one layer
 * and one read in prefill, within one token in decode. Harmless when nothing runs: the request
 * is forgotten when the next call begins. */
HR_API void hr_cancel(hr_session *session);

/* Routed experts of the last hr_eval call, for tests and traces: for every MoE
 * layer (in layer order) and token, top_k ids in rank order (score descending, id
 * ascending) and their mixing weights. Must be switched on before, with the most tokens
 * that a call will have: that room is taken from `ram` here (HR_ERR_MEMORY when it lacks it; nothing is
 * recorded then) and given back by 0. hr_eval and hr_generate with more are HR_ERR_USAGE and evaluate
 * nothing. `ids` and `weights` are [moe_layers][n][top_k]; rows keep layers' own top_k in front and -1
 * behind. HR_ERR_USAGE when n is not the last call's token count. */
HR_API hr_status hr_session_record_routes(hr_session *session, uint32_t tokens, hr_error *err);
HR_API hr_status hr_session_routes(const hr_session *session, size_t n, int32_t *ids,
                                   float *weights, hr_error *err);

/* Called on the evaluating thread after each MoE layer of each chunk, for calibration and traces:
 * what the routed experts of decoder layer `layer` read, float32 [n][width], and the routes, [n][top_k]
 * in rank order with their weights. The pointers live until it returns. */
typedef void (*hr_moe_fn)(void *user, uint32_t layer, uint32_t n, uint32_t width, uint32_t top_k,
                          const float *inputs, const int32_t *ids, const float *weights);
/* fn NULL ends it. Changes no result. */
HR_API hr_status hr_session_tap(hr_session *session, hr_moe_fn fn, void *user, hr_error *err);

/* What reading ahead goes by, for traces: called before hr_moe_fn of a MoE layer with another one
 * behind it. `layer` is the decoder layer of that next one, ids [n][top_k] the experts that its router
 * likes best, in rank order, given what the present layer's router read. They live until it returns. */
typedef void (*hr_guess_fn)(void *user, uint32_t layer, uint32_t n, uint32_t top_k,
                            const int32_t *ids);
/* fn NULL ends it. Changes no result. HR_ERR_MEMORY: a chunk's scores do not fit what `ram` has left. */
HR_API hr_status hr_session_tap_guesses(hr_session *session, hr_guess_fn fn, void *user,
                                        hr_error *err);

/* ---- generation -------------------------------------------------------- */

typedef struct hr_stats {
    size_t size;
    uint64_t tokens_prefilled, tokens_decoded;
    uint64_t hits, misses;          /* expert requests answered by the cache or by a read */
    uint64_t reads, bytes_read;     /* expert records read and their bytes */
    uint64_t trunk_bytes_read;      /* bytes read while opening */
    uint64_t read_retries;          /* short reads, EINTR and first I/O errors repeated */
    uint64_t records_verified;
    uint64_t evictions, transient_reads; /* reads that went past a fully leased cache */
    uint64_t leases;                /* records leased now: 0 between calls */
    uint64_t cache_slots, cache_used, cache_bytes;
    uint64_t memory_used, memory_peak, memory_limit; /* the library's own account */
    double seconds_prefill, seconds_decode, seconds_waiting; /* waiting: blocked on reads */
    double seconds_compute, seconds_other; /* with waiting: all of prefill and decode; other: the
                                              cache's own work, entering and leaving a call */
    uint64_t read_fallbacks;        /* records read from another drive after one had failed */
    /* Experts read ahead: begun; asked for later (they count as misses); read in vain; taken back before
     * they began; bytes of those read, which are part of bytes_read. */
    uint64_t read_ahead_issued, read_ahead_used, read_ahead_wasted, read_ahead_cancelled;
    uint64_t read_ahead_bytes;
} hr_stats;

typedef struct hr_token {
    size_t size;
    int32_t id;            /* -1 in a last call that only brings text held back for a stop string or
                              an unfinished character; its return value is ignored */
    uint32_t index;        /* 0 for the first generated token */
    const char *bytes;     /* raw bytes of this token (of a control token: its spelling) */
    size_t bytes_len;
    const char *text;      /* valid UTF-8 that became complete with this token; may be empty */
    size_t text_len;
    float logprob;         /* natural log of the token's softmax probability at temperature 1 */
    uint32_t reserved;
    const hr_stats *stats; /* running totals of this generation */
} hr_token;

/* Called on the caller's thread after each token; return 0 to go on, anything else
 * to stop (HR_FINISH_CANCELLED). The pointers live until it returns. It must not evaluate,
 * generate, reset, load or free its own session. */
typedef int32_t (*hr_token_fn)(void *user, const hr_token *token);

enum {
    HR_FINISH_STOP = 0,      /* a stop id or stop string */
    HR_FINISH_LENGTH = 1,    /* max_tokens */
    HR_FINISH_CONTEXT = 2,   /* the context is full */
    HR_FINISH_CANCELLED = 3, /* hr_cancel, or the callback */
    HR_FINISH_ERROR = 4
};

typedef struct hr_generate_params {
    size_t size;
    uint32_t max_tokens;       /* 0 = until the context is full */
    float temperature;         /* 0 = greedy (ties: lowest id); default 0 */
    uint32_t top_k;            /* 0 = off */
    float top_p;               /* 1 = off; in (0, 1] */
    float min_p;               /* 0 = off; in [0, 1) */
    float repetition_penalty;  /* 1 = off; > 0; over the prompt and what was generated */
    uint32_t ignore_stop_ids;  /* 1 = keep going past the model's stop ids */
    uint64_t seed;             /* same seed, same text, on every machine */
    const int32_t *stop_ids;   /* in addition to the model's own; may be NULL */
    size_t stop_id_count;
    const char *const *stop;   /* stop strings, not part of the text; may be NULL */
    size_t stop_count;         /* at most 16, each 1..256 bytes */
} hr_generate_params;

HR_API void hr_generate_params_init(hr_generate_params *params);

typedef struct hr_generation {
    size_t size;
    int32_t finish;          /* HR_FINISH_* */
    uint32_t tokens;         /* tokens generated (the stop id not counted) */
    int32_t stop_id;         /* the id that stopped it, or -1 */
    int32_t stop_string;     /* index of the stop string that stopped it, or -1 */
    hr_stats stats;
} hr_generation;

/* Evaluates the prompt ids (n may be 0 when the session has a position > 0 and a
 * previous generate or eval left logits), then samples and evaluates tokens until
 * something ends it. The last sampled token is reported before it is evaluated;
 * the next hr_generate or hr_eval evaluates it first (it counts against ctx there).
 * All texts of one generation concatenate to the hr_detokenize of its ids, with
 * U+FFFD for ill-formed sequences. A stop id is not reported. Text that might begin a stop
 * string is held back until it cannot. params may be NULL, callback may be NULL.
 * out->size must be set when out is not NULL. Returns HR_OK for every finish
 * except HR_FINISH_ERROR. A prompt that does not fit returns HR_ERR_CONTEXT with
 * needed and available counts, the session untouched. */
HR_API hr_status hr_generate(hr_session *session, const int32_t *ids, size_t n,
                             const hr_generate_params *params, hr_token_fn callback, void *user,
                             hr_generation *out, hr_error *err);

/* Totals since the model was opened. stats->size must be set by the caller. */
HR_API hr_status hr_get_stats(const hr_model *model, hr_stats *stats, hr_error *err);

/* One drive's part in reading experts, since the model was opened. */
typedef struct hr_drive_info {
    size_t size;
    uint64_t reads, bytes_read;
    uint64_t failures;         /* reads that gave no good record */
    double seconds_reading;    /* with a read in flight: bytes_read over it is the bandwidth it had */
    double probed;             /* bytes per second, measured while opening; 0 = not measured */
    uint32_t banks, in_flight; /* bank files it holds; most reads at once */
    uint32_t left_out;         /* 1 after errors in a row: read only where no other drive has the bank */
    char io_mode[16];          /* as in hr_model_info; "absent" without a bank file */
    char path[512];            /* cut when longer */
} hr_drive_info;

/* Drive 0 is the container's own directory, then hr_model_params.drives in their order. HR_ERR_USAGE
 * past the last. info->size must be set by the caller. */
HR_API hr_status hr_get_drive(const hr_model *model, uint32_t drive, hr_drive_info *info,
                              hr_error *err);

/* ---- quantisation ------------------------------------------------------ */

/* Matrices to and from the blobs of a container, for converters. Results are the
 * same bits for every isa and thread count. Codecs are named as in
 * formats/codecs.md; the rvq ones need codebooks, the others take NULL for them. */

/* How hard fit and encode search. GREEDY: residual k-means and one candidate, the
 * baseline that the others are measured against. */
enum { HR_EFFORT_GREEDY = 0, HR_EFFORT_DEFAULT = 1, HR_EFFORT_HIGH = 2 };

typedef struct hr_quant_params {
    size_t size;
    char codec[16];  /* "rvq4x64" (default), "rvq3x256", "rvq2x256", "int8", ... */
    int32_t effort;  /* HR_EFFORT_* ; default HR_EFFORT_DEFAULT */
    uint32_t beam;   /* candidates kept between stages, at most 32; 0 = by effort */
    uint32_t threads; /* caller included; 0 = physical cores available */
    uint32_t reserved;
    uint64_t seed;   /* of the first guess of fit */
    char isa[16];    /* as in hr_model_params */
} hr_quant_params;

HR_API void hr_quant_params_init(hr_quant_params *params);

/* Bytes of a matrix [rows, cols] and of the codebooks (0 without). */
HR_API hr_status hr_quant_bytes(const hr_quant_params *params, uint32_t rows, uint32_t cols,
                                uint64_t *blob, uint64_t *books, hr_error *err);
/* Codebooks for matrices like w [rows, cols], row-major: a sample of rows. 65,536
 * sub-vectors of 8 or more are advisable. `books` receives what hr_quant_bytes says.
 * HR_ERR_NUMERIC when a weight is NaN or infinite, with the count and the first. */
HR_API hr_status hr_quant_fit(const hr_quant_params *params, const float *w, uint32_t rows,
                              uint32_t cols, void *books, hr_error *err);
/* importance [cols] (may be NULL; finite, >= 0) weighs the squared error of each
 * input; rvq only. HR_ERR_NUMERIC as above. */
HR_API hr_status hr_quant_encode(const hr_quant_params *params, const void *books, const float *w,
                                 uint32_t rows, uint32_t cols, const float *importance, void *blob,
                                 hr_error *err);
/* What is known of a matrix's inputs, for hr_quant_encode_feedback: from x [n, cols], row-major, a row
 * for every input seen, each counting by its own size. damping, finite and positive, is added to the
 * mean square of every input as a share of their mean: the less is known, the more is wanted (0.1
 * where n is many times cols). `moments` receives hr_quant_moments_bytes(cols); n may be 0. */
HR_API uint64_t hr_quant_moments_bytes(uint32_t cols);
HR_API hr_status hr_quant_moments(const hr_quant_params *params, const float *x, uint32_t n,
                                  uint32_t cols, double damping, void *moments, hr_error *err);
/* As hr_quant_encode for rvq codecs, but what is kept small is the error of products with such
 * inputs: later weights of a row make up for the errors of earlier ones. */
HR_API hr_status hr_quant_encode_feedback(const hr_quant_params *params, const void *books,
                                          const float *w, uint32_t rows, uint32_t cols,
                                          const void *moments, void *blob, hr_error *err);
HR_API hr_status hr_quant_decode(const hr_quant_params *params, const void *books, const void *blob,
                                 uint32_t rows, uint32_t cols, float *w, hr_error *err);
/* Sums over the matrix of m w^2 and of m (w - decoded)^2, m being the importance or 1. */
HR_API hr_status hr_quant_error(const hr_quant_params *params, const void *books, const void *blob,
                                const float *w, uint32_t rows, uint32_t cols,
                                const float *importance, double *signal, double *noise,
                                hr_error *err);

/* ---- benchmark --------------------------------------------------------- */

typedef struct hr_bench_params {
    size_t size;
    char isa[16];        /* as in hr_model_params */
    double seconds;      /* of measuring, shared between the rows; the pool is filled besides; 0 = 20;
                            at most 3600. Slow kernels and a busy machine take longer */
    uint32_t rows, cols; /* of the matrices; 0 = 1024, 2048; at most 65536 */
    /* Bytes of weights that are walked through; 0: four times the largest cache, at least 256 MiB.
     * A smaller pool measures caches. */
    uint64_t pool;
} hr_bench_params;

HR_API void hr_bench_params_init(hr_bench_params *params);

enum {
    HR_BENCH_CODEC = 0,     /* matrix product with the codec `name` */
    HR_BENCH_OPERATION = 1, /* another kernel */
    HR_BENCH_READ = 2,      /* the plain memory read; after all others */
    HR_BENCH_PEAK = 3       /* the instructions of the int8 dot product on registers; last */
};

/* One measurement. Rates are per second of the thread's own processor time, medians over `repeats`,
 * each of which measures the plain read, the kernel and the dot peak one after the other; a ratio is
 * the median of the repeats' own ratios. A spread is (highest - lowest) / median. What does not apply
 * is 0. */
typedef struct hr_bench_row {
    size_t size;
    char name[24];
    char isa[16];
    int32_t kind;           /* HR_BENCH_* */
    uint32_t tokens;        /* multiplied together */
    uint32_t rows, cols;
    uint32_t repeats, reserved;
    double weights_per_second;
    double bytes_per_second; /* stored bytes; of `delta` those of the state, which is also written;
                                of `quantize` those of the float32 inputs, which are in the cache */
    double macs_per_second;  /* multiply-accumulates of the mathematics: weights times tokens */
    double spread;           /* of the rates */
    double read_ratio, read_spread; /* bytes_per_second over that of the plain read */
    double peak_ratio, peak_spread; /* macs_per_second over the int8 dot peak */
    double seconds;          /* passed for this row, the other two measurements included */
    uint64_t cache, pool, memory; /* bytes: largest cache (as assumed when unknown), pool, all
                                     that this call allocates */
} hr_bench_row;

/* A return other than 0 stops with HR_ERR_CANCELLED. The row lives until it returns. */
typedef int32_t (*hr_bench_fn)(void *user, const hr_bench_row *row);

/* Measures every codec with 1, 4, 16 and 64 tokens, then the other kernels, on the calling thread.
 * Weights are pseudo-random. HR_ERR_MEMORY when the pool does not fit what is available. params may
 * be NULL. */
HR_API hr_status hr_bench_kernels(const hr_bench_params *params, hr_bench_fn callback, void *user,
                                  hr_error *err);

/* ---- advice: will a model run here, and how fast ------------------------ */

/* Reads in flight, and what a drive gives then. */
typedef struct hr_disk_rate {
    uint32_t depth, reads;    /* reads: how many it was measured with; 0: it was not */
    double bytes_per_second;
    double lowest, highest;   /* of the slices of time it was measured in */
    double seconds_per_read;
} hr_disk_rate;

typedef struct hr_probe_params {
    size_t size;
    double disk_seconds;    /* of reading, in all; 0 = 2; below 0: the drive is not measured */
    double compute_seconds; /* of computing, in all; 0 = 1; below 0: not measured */
    uint64_t record_bytes;  /* of one read, for a path that is no container; 0 = 1 MiB */
    uint64_t seed;          /* which records are read; 0: others at each call */
    uint64_t pool;          /* bytes of weights to walk through; 0: more than caches hold. No more is taken */
    int32_t direct;         /* as in hr_model_params */
    uint32_t threads;       /* as in hr_model_params */
    char isa[16];
    char expert_codec[16], trunk_codec[16]; /* "" or "none": not measured */
    char other_codec[16];   /* experts in another codec beside; "": none */
    uint32_t expert_width, expert_inner, top_k, trunk_rows, trunk_cols;
    uint32_t expert_activations; /* 22: of mxfp4 experts; 0 or 8: what their codec takes by itself */
} hr_probe_params;

/* Defaults; from a plan (may be NULL) also what it says of shapes, codecs and threads. */
HR_API void hr_probe_params_init(hr_probe_params *params, const hr_plan_result *plan);

typedef struct hr_probe_result {
    size_t size;
    /* The drive. `cold` is proven: the system accounts for reads from devices (`accounted`), and they
     * were at least 98 % of what was asked for. Otherwise figures may be those of memory. */
    hr_disk_rate disk[4];   /* ascending depth */
    uint32_t disk_rates;    /* 0: not measured */
    uint32_t best_depth;    /* the smallest within 5 % of the highest rate */
    uint64_t asked, physical; /* bytes */
    uint32_t accounted, cold, direct;
    uint32_t fresh;         /* measured with a file written just now, which flatters some drives */
    uint32_t rotational, usb, network, memory; /* facts, where the system tells */
    char filesystem[24], device[40];
    /* All threads together, bytes per second; 0: not measured. */
    double memory_rate;     /* a plain read */
    double expert_rate, other_rate, trunk_rate; /* stored bytes of weights, one token */
    double dispatch_seconds; /* a parallel region with nothing in it */
    uint32_t threads;
    uint32_t expert_activations; /* that expert_rate was measured with, as in hr_model_info */
    /* The machine. UINT64_MAX: no limit */
    uint64_t physical_memory, available, cgroup_room, memlock, swap_used;
    char huge_pages[16];
} hr_probe_result;

/* Measures the drive under `path` and what all threads compute. Of a container its banks are read, of a
 * file the file itself; in a directory without a manifest a scratch file is written, read and gone.
 * path may be NULL when the drive is not measured. */
HR_API hr_status hr_probe(const char *path, const hr_probe_params *params, hr_probe_result *result,
                          hr_error *err);

/* The cache of experts driven by recorded routes: the engine's own code decides what stays, and
 * nothing is read. */
typedef struct hr_simulate_params {
    size_t size;
    uint32_t layers, experts, top_k; /* layers with experts, experts of each, the most a token uses */
    uint32_t slots;   /* experts that the cache holds */
    int32_t policy;   /* HR_CACHE_* */
    uint32_t prefill; /* tokens at the start that are evaluated in chunks; the others one by one */
    uint32_t chunk;   /* of prefill; 0 = 512 */
    uint32_t warm_up; /* tokens at the start whose requests are not counted */
    /* Reading ahead. Guesses for layer 0 are not used, nor those of chunks of more than two tokens. */
    uint32_t read_ahead;    /* ranks of a token; 0 = none */
    uint32_t guess_ranks;   /* of guesses; at least read_ahead, at most experts */
    const int32_t *guesses; /* [tokens][layers][guess_ranks], the best first, -1 behind a shorter list;
                               NULL: none */
    /* The time of a token that is evaluated alone; all 0: everything that was begun is there at once. */
    double read_seconds;    /* of a record, when there are always others to read */
    double layer_seconds;   /* arithmetic of a layer but for its experts */
    double expert_seconds;  /* arithmetic of one */
    uint32_t in_flight;     /* reads that a drive works on at once; 0 = 4 */
    uint32_t reserved;
} hr_simulate_params;

HR_API void hr_simulate_params_init(hr_simulate_params *params);

typedef struct hr_simulate_result {
    size_t size;
    uint64_t tokens;       /* counted */
    uint64_t hits, misses; /* of those tokens */
    uint64_t evictions, transient_reads;
    /* As in hr_stats; what is read ahead counts as a miss when it is used. */
    uint64_t read_ahead_issued, read_ahead_used, read_ahead_wasted, read_ahead_cancelled;
    uint64_t alone;          /* of the counted tokens those evaluated one by one; the seconds are theirs */
    double seconds;          /* of them all */
    double seconds_blocked;  /* of these, waiting for the drive */
    double seconds_wanted;   /* of reading what they missed, read ahead or not */
} hr_simulate_result;

/* ids [tokens][layers][top_k] in any order, -1 behind a shorter list. misses [top_k + 1] (may be NULL)
 * receives how many of the counted layers of single tokens missed 0, 1, ... experts. */
HR_API hr_status hr_simulate(const hr_simulate_params *params, const int32_t *ids, size_t tokens,
                             uint64_t *misses, hr_simulate_result *result, hr_error *err);

enum { HR_LIMIT_DISK = 0, HR_LIMIT_MEMORY = 1, HR_LIMIT_COMPUTE = 2 };
enum { HR_READY = 0, HR_WARN = 1, HR_NO = 2 };
/* What could be changed. */
enum {
    HR_LEVER_RAM = 0,          /* twice the ram, or what holds the whole model */
    HR_LEVER_FASTER_DRIVE = 1, /* twice the bandwidth */
    HR_LEVER_SECOND_DRIVE = 2, /* the experts split over two such drives */
    HR_LEVER_CODEC = 3,        /* experts in other_codec of the probe */
    HR_LEVER_THREADS = 4,      /* twice the cores, of the same memory */
    HR_LEVERS = 5
};

typedef struct hr_forecast_params {
    size_t size;
    const hr_plan_result *plan;
    const hr_probe_result *probe;
    double hit_rate;         /* share of expert requests that the cache answers; below 0: by a table of
                                measured models, from cache size and numbers of experts */
    const double *misses;    /* [miss_count]: share of layers that miss 0, 1, ... experts; NULL: from hit_rate */
    uint32_t miss_count;
    uint32_t position;       /* tokens of context; 0 = 512 */
    uint64_t other_record_bytes; /* an expert in other_codec; 0: unknown */
} hr_forecast_params;

HR_API void hr_forecast_params_init(hr_forecast_params *params);

typedef struct hr_forecast_result {
    size_t size;
    double tokens_per_second, low, high; /* of decoding */
    double hit_rate, hit_low, hit_high;
    double bytes_read;       /* from disk, per token */
    double seconds_disk, seconds_compute; /* per token, each as if it were alone */
    double lever[5];         /* HR_LEVER_*: tokens per second with it; 0: does not apply or is unknown */
    int32_t limit;           /* HR_LIMIT_* */
    int32_t best_lever;      /* HR_LEVER_*; -1: none gains 5 % */
    int32_t verdict;         /* HR_READY, HR_WARN, HR_NO */
    uint32_t reasons;        /* texts in `reason`, the gravest first */
    int32_t grade[12];       /* of each: HR_NO, HR_WARN, or HR_READY for what is only worth knowing */
    char reason[12][224];
} hr_forecast_result;

/* From numbers alone: reads nothing. HR_ERR_USAGE when the probe lacks what it needs. */
HR_API hr_status hr_forecast(const hr_forecast_params *params, hr_forecast_result *result,
                             hr_error *err);

/* ---- hashing ----------------------------------------------------------- */

/* Incremental SHA-256, so that programs can publish the hash of their logits
 * without another dependency. hash receives 32 bytes. */
typedef struct hr_sha256 {
    uint32_t state[8];
    uint64_t length;
    uint8_t block[64];
} hr_sha256;
HR_API void hr_sha256_init(hr_sha256 *hash);
HR_API void hr_sha256_update(hr_sha256 *hash, const void *data, size_t n);
HR_API void hr_sha256_final(hr_sha256 *hash, uint8_t out[32]);

/* CRC32C (Castagnoli) of n more bytes, for programs that write containers; `crc` is that of the
 * bytes before, 0 at the start. */
HR_API uint32_t hr_crc32c(uint32_t crc, const void *data, size_t n);

#ifdef __cplusplus
}
#endif
#endif
