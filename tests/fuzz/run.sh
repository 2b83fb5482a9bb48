#!/bin/sh
# Runs every fuzzer of a fuzz build (meson -Dfuzz=true) one after the other, on one core.
#     tests/fuzz/run.sh FUZZ_BUILD BUILD SECONDS
# FUZZ_BUILD holds the fuzzers, and under bases/, corpus/ and findings/ what they use and leave;
# BUILD is an ordinary build, whose library encodes and checks what the converter writes. SECONDS are
# shared between the fuzzers. PYTHON names the interpreter. Ends with 1 at a finding.
set -u
fuzz=$1
build=$2
seconds=$3
here=$(dirname "$0")
python=${PYTHON:-python}
export ASAN_OPTIONS="${ASAN_OPTIONS:-abort_on_error=0:allocator_may_return_null=1}"
mkdir -p "$fuzz/findings" "$fuzz/logs"
"$python" "$here/bases.py" "$build" "$fuzz/bases" >"$fuzz/logs/bases.log" 2>&1 || { cat "$fuzz/logs/bases.log"; exit 1; }
failed=0

report() { # name, exit code
    runs=$(sed -n 's/^stat::number_of_executed_units: *//p; s/^converter: \([0-9]*\) executions.*/\1/p' "$fuzz/logs/$1.log" | tail -n 1)
    edges=$(sed -n 's/.* cov: \([0-9]*\) .*/\1/p' "$fuzz/logs/$1.log" | tail -n 1)
    echo "$1: ${runs:-0} executions, ${edges:-no} edges covered, $([ "$2" = 0 ] && echo no finding || echo A FINDING)"
    [ "$2" = 0 ] || { tail -n 60 "$fuzz/logs/$1.log"; failed=1; }
}
run() { # name, share of the time in percent, largest input, command
    name=$1
    time=$((seconds * $2 / 100))
    length=$3
    shift 3
    mkdir -p "$fuzz/corpus/$name"
    "$@" -max_total_time="$time" -max_len="$length" -rss_limit_mb=2048 -timeout=300 -report_slow_units=300 \
        -print_final_stats=1 -artifact_prefix="$fuzz/findings/$name-" "$fuzz/corpus/$name" \
        "$here/corpus/$name" --containers="$fuzz/bases/containers" \
        --tokenizers="$fuzz/bases/tokenizers" --work="${FUZZ_WORK:-/dev/shm}" \
        >"$fuzz/logs/$name.log" 2>&1
    report "$name" $?
}
fuzzers=${FUZZ_BINARIES:-$fuzz/tests/fuzz}
run manifest 28 512 "$fuzzers/fuzz_manifest"
run records 28 512 "$fuzzers/fuzz_records"
run session 12 512 "$fuzzers/fuzz_session"
run tokenizer 10 16384 "$fuzzers/fuzz_tokenizer"
run json 8 16384 "$fuzzers/fuzz_json"
run converter 14 256 "$python" "$here/fuzz_converter.py" "$build"
exit $failed
