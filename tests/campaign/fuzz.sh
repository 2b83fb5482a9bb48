#!/bin/sh
# A long fuzzing campaign: tests/campaign/fuzz.sh MINUTES
# Needs clang with libFuzzer; with atheris (pip install atheris) the converter's part is guided by
# coverage too. Keeps the corpus in build/fuzz/corpus between campaigns. Ends with one line for the
# table in docs/reliability.md.
set -u
minutes=${1:?usage: tests/campaign/fuzz.sh MINUTES}
cd "$(dirname "$0")/../.." || exit 1
python=${PYTHON:-python3}
commit=$(git rev-parse --short HEAD 2>/dev/null || echo unknown)
[ -z "$(git status --porcelain --untracked-files=no 2>/dev/null)" ] || commit="$commit and changes"
for kind in build build/fuzz; do
    [ -f $kind/build.ninja ] && continue
    case $kind in
    build) "$python" -m mesonbuild.mesonmain setup build -Dtests=true ;;
    *) CC=clang "$python" -m mesonbuild.mesonmain setup build/fuzz -Dfuzz=true -Dstatic_binary=disabled \
        -Dbuildtype=debugoptimized -Db_lundef=false -Db_sanitize=address,undefined ;;
    esac >/dev/null || exit 1
done
for kind in build build/fuzz; do
    "$python" -m mesonbuild.mesonmain compile -C $kind >$kind/campaign.log 2>&1 || { tail -n 30 $kind/campaign.log; exit 1; }
done
before=$(ls build/fuzz/findings 2>/dev/null | wc -l)
PYTHON=$python sh tests/fuzz/run.sh "$PWD/build/fuzz" "$PWD/build" $((minutes * 60)) | tee build/fuzz/campaign.txt
after=$(ls build/fuzz/findings | wc -l)
counts=$(sed -n 's/^\([a-z]*\): \([0-9]*\) executions.*/\1 \2/p' build/fuzz/campaign.txt | paste -sd, - | sed 's/,/, /g')
line="| $(date -u +%F) | $commit | $minutes min | $counts | $((after - before)) |"
echo "$line" >>build/fuzz/campaigns.txt
echo "$line"
[ "$after" = "$before" ]
