#!/bin/sh
# Tests a change of the GPU backend on a machine that has two GPUs and needs no Rust toolchain.
#
#   tools/gpus.sh pack DIR        Run on a machine with Rust: builds the binary and the GPU tests, and puts them stripped into DIR.
#   tools/gpus.sh check DIR OUT [NAME...]
#                                 Run on the machine with GPUs: runs the named checks, or all of them, and writes their output to OUT.
#                                   lib          the unit tests of tessera-cuda
#                                   exchange     collectives over peer memory and NCCL, their faults and their speed
#                                   conformance  the conformance suite
#                                   frames       compares the ops on frames in bf16 with f32
#                                   digests      compares the latents of one GPU and of two bit by bit
#                                   block        compares a transformer block with float64; needs PyTorch
#                                   streams      compares streams with the CPU backend, and runs drills
#   tools/gpus.sh trace DIR OUT   Run on the machine with GPUs: writes timelines of whole forwards on one GPU, on one GPU in fp8, and
#                                 on two GPUs, beside the plan's estimate.
#
# Exit status: 0 if everything passed, 1 if something failed, 2 for wrong arguments.
set -u
usage() { sed -n '2,/^# Exit/p' "$0" | sed 's/^# \{0,1\}//' >&2; exit 2; }
# Makes a path absolute, because the script changes to the repository root below.
absolute_path() { case $1 in /*) echo "$1" ;; *) echo "$PWD/$1" ;; esac }
case ${1-}-$# in
pack-2) bin=$(absolute_path "$2") && mkdir -p "$bin" || exit 2 ;;
check-[3-9] | trace-3) bin=$(absolute_path "$2") out=$(absolute_path "$3") && mkdir -p "$out" || exit 2 ;;
*) usage ;;
esac
cd "$(dirname "$0")/.." || exit 2
failed=0
names="${4+$(shift 3 && echo "$*")}"
for name in $names; do
    case $name in lib | exchange | conformance | frames | digests | block | streams) ;; *) usage ;; esac
done
# Whether a check was selected.
is_selected() {
    case " ${names:-$1} " in *" $1 "*) ;; *) return 1 ;; esac
}

# run_logged NAME SECONDS COMMAND...: runs a command with a time limit, writes its output to OUT and prints the verdict.
run_logged() {
    name=$1 limit=$2 start=$(date +%s)
    shift 2
    timeout "$limit" "$@" >"$out/$name.txt" 2>&1
    status=$?
    verdict=passed
    [ $status -eq 0 ] || verdict="FAILED with exit status $status"
    skipped=$(grep -c 'skipped: \|not run: \|not run on ' "$out/$name.txt")
    [ "$skipped" -eq 0 ] || verdict="$verdict, $skipped skipped"
    echo "$name: $verdict, $(($(date +%s) - start)) s"
    return $status
}

case $1 in
pack)
    cargo build --release -p tessera-cli || exit 1
    cp "${CARGO_TARGET_DIR:-target}/release/tessera" "$bin/tessera" || exit 1
    for test in "tessera-cuda --lib lib" "tessera-cuda --test=exchange exchange" "tessera-tools --test=cuda conformance" "tessera-tools --test=cuda_frames frames" "tessera-cli --test=cuda streams"; do
        set -- $test
        executable=$(cargo test --release -p "$1" "$2" --no-run --message-format=json | python3 -c '
import json, sys
print([m["executable"] for m in map(json.loads, sys.stdin) if m.get("executable") and m["profile"]["test"]][-1])') || exit 1
        cp "$executable" "$bin/$3" || exit 1
    done
    strip "$bin"/* && ls -l "$bin"
    ;;
check)
    export TESSERA_ROOT="$PWD" TESSERA_BIN="$bin/tessera" TESSERA_FILETESTS="$PWD/filetests"
    ! is_selected lib || run_logged lib 240 "$bin/lib" --nocapture --test-threads=1 || failed=1
    ! is_selected exchange || run_logged exchange 900 "$bin/exchange" --gpus 2 || failed=1
    ! is_selected conformance || run_logged conformance 400 "$bin/conformance" --nocapture --test-threads=1 || failed=1
    ! is_selected frames || run_logged frames 300 "$bin/frames" --nocapture --test-threads=1 || failed=1
    for dtype in $(! is_selected digests || echo bf16 fp8); do
        for ranks in 1 2; do
            run_logged "digest-$dtype-$ranks" 120 "$bin/tessera" bench dit --size 480x832,320x576 --layers 2 --warm 0 --steps 2 --digest \
                --dtype $dtype --mesh tp=$ranks || failed=1
            grep -o 'latent [0-9a-f]*' "$out/digest-$dtype-$ranks.txt" >"$out/latents-$ranks"
        done
        if ! [ -s "$out/latents-1" ] || ! [ -s "$out/latents-2" ]; then
            echo "latents in $dtype: NOT COMPARED, because a run printed no digest" && failed=1
        elif cmp -s "$out/latents-1" "$out/latents-2"; then
            echo "latents in $dtype: bit-equal on one GPU and on two"
        else
            echo "latents in $dtype: DIFFERENT on one GPU and on two" && failed=1
        fi
        rm -f "$out/latents-1" "$out/latents-2"
    done
    if ! is_selected block; then
        :
    elif python3 -c 'import torch' 2>/dev/null; then
        case=$(mktemp -d)
        run_logged block 240 sh -ec '
            python3 tools/bench/dit_gpu.py --layers 1 --size 128x256 --dump "$1"
            for limits in "bf16 0.02" "fp8 0.1"; do
                set -- "$1" "$2" $limits
                "$2" bench dit "$1" --case --dtype "$3" --size 128x256 --warm 0 --steps 1
                python3 tools/bench/check_case.py "$1" --limit "$4"
            done' block "$case" "$bin/tessera" || failed=1
        rm -rf "$case"
    else
        echo "block: skipped, PyTorch is not installed"
        [ -z "$names" ] || failed=1
    fi
    ! is_selected streams || run_logged streams 480 "$bin/streams" --nocapture --test-threads=1 || failed=1
    exit $failed
    ;;
trace)
    run="$bin/tessera bench dit --size 480x832,320x576 --warm 2 --steps 6 --trace 3"
    (CUDA_VISIBLE_DEVICES=0 && export CUDA_VISIBLE_DEVICES && run_logged timeline-tp1 200 $run --mesh tp=1) &
    bf16_run=$!
    (CUDA_VISIBLE_DEVICES=1 && export CUDA_VISIBLE_DEVICES && run_logged timeline-tp1-fp8 200 $run --mesh tp=1 --dtype fp8) || failed=1
    wait $bf16_run || failed=1
    run_logged timeline-tp2 200 $run --mesh tp=2 || failed=1
    exit $failed
    ;;
esac
