#!/bin/sh
# From a fresh clone to text: builds the engine, converts the bundled checkpoint, generates.
# Everything goes into .venv/ and build/ of this folder; needs git, a C compiler, python3 with venv.
#     ./run.sh [PROMPT]
set -eu
cd "$(dirname "$0")"
prompt=${1:-'"My dear Mr. Holmes," said the'}

. ./tools/environment.sh
prepare_environment numpy tqdm meson ninja

if [ ! -f build/build.ninja ]; then
    echo '== configuring'
    mkdir -p build
    python -m mesonbuild.mesonmain setup build >build/setup.log 2>&1 || { cat build/setup.log >&2; exit 1; }
fi
echo '== building the engine'
python -m mesonbuild.mesonmain compile -C build >build/compile.log 2>&1 || { cat build/compile.log >&2; exit 1; }

bundled_container

echo '== generating with a fifth of the experts in memory (statistics follow the text)'
echo
printf '%s' "$prompt"
./build/headrace run build/model -p "$prompt" --ram 12MiB --ctx 512 --threads 2 --max-tokens 120 \
    --temperature 0.8 --top-k 40 --top-p 0.95 --seed 1
