#!/bin/sh
# Every test: the suite on an optimised build, other machines, the sanitizers, the fuzzers. About
# 15 minutes on two cores. Arguments go to pytest of the first stage; with arguments only that stage runs.
#     ./test.sh [PYTEST ARGUMENTS]
set -u
cd "$(dirname "$0")" || exit 1
. ./tools/environment.sh
prepare_environment numpy tqdm meson ninja meson-python pytest pytest-timeout hypothesis cffi \
    tokenizers safetensors tiktoken pytest-xdist
export PYTHONDONTWRITEBYTECODE=1

# Many tests wait for a process or the disk; more workers than this only fight over memory.
workers=$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
[ "$workers" -le 4 ] || workers=4
parallel="-n $workers --dist worksteal --durations=10"
failed=
skipped=
stage() {
    echo
    echo "== $1"
    shift
    "$@" || failed="$failed; $*"
}
skip() {
    echo
    echo "== SKIPPED: $1"
    skipped="$skipped
SKIPPED: $1"
}

if [ $# -gt 0 ]; then
    exec python -m pytest --build-dir build "$@"
fi

main_log=build/test-summary.log
mkdir -p build
suite() {
    python -m pytest --build-dir build $parallel --ignore=tests/platforms tests 2>&1 | tee "$main_log"
    passed "$main_log"
}
passed() { # a log of pytest
    tail -n 1 "$1" | grep -q ' passed' && ! tail -n 1 "$1" | grep -Eq 'failed|error'
}
stage 'the suite' suite

# Compilers for other machines and emulators: what is missing is said again at the end.
platforms_log=build/platforms-summary.log
platforms() {
    python -m pytest --build-dir build --no-build -n "$workers" --dist loadfile --durations=5 \
        tests/platforms 2>&1 | tee "$platforms_log"
    passed "$platforms_log"
}
stage 'other machines and the supply chain' platforms
skipped="$skipped
$(grep '^SKIPPED' "$platforms_log" || true)"

sanitized_build() { # directory, sanitizers
    [ -f "$1/build.ninja" ] || python -m mesonbuild.mesonmain setup "$1" -Dtests=true \
        -Dstatic_binary=disabled -Dbuildtype=debugoptimized -Db_sanitize="$2" -Db_lundef=false \
        >/dev/null || return 1
    python -m mesonbuild.mesonmain compile -C "$1" >"$1/compile.log" 2>&1 || { cat "$1/compile.log"; return 1; }
}

# Left out: tests of Python code alone, of what codecs lose, and long ones whose C code others run as well.
left_out=$(for test in system/test_convert system/test_convert_faults system/test_convert_resume \
    system/test_convert_latent system/test_convert_rvq system/test_budget_conversion \
    system/test_published_sizes system/test_family_faults system/test_kld system/test_install \
    system/test_bench system/test_determinism system/test_cases_conversion \
    system/test_hostile_checkpoints system/test_convert_injection system/test_quality_order \
    system/test_paired system/test_synth system/test_plan_checkpoint system/test_requantised \
    system/test_simulate system/test_doctor unit/test_decoders oracle/test_reference_model; do
    echo "--ignore=tests/$test.py"
done; echo --ignore=tests/platforms)
address_suite() {
    sanitized_build build/asan address,undefined || return 1
    # The interpreter is not instrumented: the run-time library must be there before it starts, and
    # what the interpreter itself leaves behind at exit is not ours.
    LD_PRELOAD="$(${CC:-cc} -print-file-name=libasan.so) $(${CC:-cc} -print-file-name=libubsan.so)" \
    ASAN_OPTIONS=detect_leaks=0:abort_on_error=1:detect_stack_use_after_return=0 \
    UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
        python -m pytest --build-dir build/asan --no-build $parallel -m 'not slow and not plain_build' \
        -k 'not validation_text and not float_line and not gaussian_weights and not heavy_tails and not (same_bytes_for and x256)' tests \
        $left_out
}
thread_programs() {
    sanitized_build build/tsan thread && bundled_container || return 1
    (
        cd build/tsan && export TSAN_OPTIONS=halt_on_error=1:exitcode=66 &&
            tests/unit/tsan_pool &&
            tests/unit/tsan_cache ../model 60 &&
            tests/unit/tsan_sessions ../model . 20 &&
            ./headrace run ../model -p 'The captain stood upon the deck' --ctx 256 --threads 4 \
                --max-tokens 20
    )
}
can_sanitize() {
    echo 'int main(void) { return 0; }' >build/probe.c
    ${CC:-cc} -fsanitize="$1" build/probe.c -o build/probe >/dev/null 2>&1 && build/probe
}
if can_sanitize address,undefined; then
    stage 'the suite on an AddressSanitizer and UndefinedBehaviorSanitizer build' address_suite
else
    skip 'AddressSanitizer: this compiler cannot link it'
fi
fuzzers() {
    [ -f build/fuzz/build.ninja ] || CC=clang python -m mesonbuild.mesonmain setup build/fuzz \
        -Dfuzz=true -Dstatic_binary=disabled -Dbuildtype=debugoptimized -Db_lundef=false \
        -Db_sanitize=address,undefined >/dev/null || return 1
    python -m mesonbuild.mesonmain compile -C build/fuzz >build/fuzz/compile.log 2>&1 || { cat build/fuzz/compile.log; return 1; }
    PYTHON=python sh tests/fuzz/run.sh "$PWD/build/fuzz" "$PWD/build" 120
}
fuzz_probe() {
    printf '#include <stddef.h>\n#include <stdint.h>\nint LLVMFuzzerTestOneInput(const uint8_t *d, size_t n) { return d && n ? 0 : 0; }\n' >build/probe.c
    clang -fsanitize=fuzzer,address build/probe.c -o build/probe >/dev/null 2>&1
}
# The fuzzers use one core: the ThreadSanitizer stage runs beside them.
fuzzing=
if fuzz_probe; then
    fuzzers >build/fuzz-summary.log 2>&1 &
    fuzzing=$!
fi
if can_sanitize thread; then
    stage 'threads under ThreadSanitizer' thread_programs
else
    skip 'ThreadSanitizer: this compiler cannot link it, or this kernel refuses its memory layout'
fi
finish_fuzzers() {
    wait "$fuzzing"
    result=$?
    cat build/fuzz-summary.log
    return $result
}
if [ -n "$fuzzing" ]; then
    stage 'fuzzers, two minutes' finish_fuzzers
else
    skip 'fuzzers: clang with libFuzzer is not installed (Debian, Ubuntu: apt-get install clang)'
fi

echo
echo "$skipped" | sed '/^$/d'
[ -z "$failed" ] || { echo "FAILED stages$failed"; }
tail -n 1 "$main_log"
[ -z "$failed" ]
