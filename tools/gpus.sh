#!/bin/sh
# What a change of the GPU backend is run through on a machine with two GPUs, which needs no Rust:
#
#   tools/gpus.sh pack DIR        where there is Rust: the binary and the tests that want GPUs, stripped, into DIR
#   tools/gpus.sh check DIR OUT [NAME...]
#                                 where there are GPUs: those tests (lib, conformance); latents of one GPU and of two, bit for bit
#                                 (digests); a block against float64, where there is PyTorch (block); streams against the processors and
#                                 drills (streams). All, or those named. What each said is in OUT
#   tools/gpus.sh trace DIR OUT   timelines of whole forwards on one GPU, in fp8, and on two, beside the plan's estimate
#
# Exit status: 0 fine, 1 something failed, 2 usage.
set -u
usage() { sed -n '2,/^# Exit/p' "$0" | sed 's/^# \{0,1\}//' >&2; exit 2; }
# A folder by its whole name: the caller's folder is left below.
whole() { case $1 in /*) echo "$1" ;; *) echo "$PWD/$1" ;; esac }
case ${1-}-$# in
pack-2) bin=$(whole "$2") && mkdir -p "$bin" || exit 2 ;;
check-[3-8] | trace-3) bin=$(whole "$2") out=$(whole "$3") && mkdir -p "$out" || exit 2 ;;
*) usage ;;
esac
cd "$(dirname "$0")/.." || exit 2
failed=0
names="${4+$(shift 3 && echo "$*")}"
for name in $names; do
    case $name in lib | conformance | digests | block | streams) ;; *) usage ;; esac
done
wanted() {
    case " ${names:-$1} " in *" $1 "*) ;; *) return 1 ;; esac
}

# NAME SECONDS COMMAND...: runs it and keeps what it says.
kept() {
    name=$1 limit=$2 begun=$(date +%s)
    shift 2
    timeout "$limit" "$@" >"$out/$name.txt" 2>&1
    status=$?
    said=fine
    [ $status -eq 0 ] || said="FAILED, status $status"
    left=$(grep -c 'skipped: \|not run on ' "$out/$name.txt")
    [ "$left" -eq 0 ] || said="$said, but $left not run here"
    echo "$name: $said, $(($(date +%s) - begun)) s"
    return $status
}

case $1 in
pack)
    cargo build --release -p tessera-cli || exit 1
    cp "${CARGO_TARGET_DIR:-target}/release/tessera" "$bin/tessera" || exit 1
    for of in "tessera-cuda --lib lib" "tessera --test=cuda conformance" "tessera-cli --test=cuda streams"; do
        set -- $of
        made=$(cargo test --release -p "$1" "$2" --no-run --message-format=json | python3 -c '
import json, sys
print([m["executable"] for m in map(json.loads, sys.stdin) if m.get("executable") and m["profile"]["test"]][-1])') || exit 1
        cp "$made" "$bin/$3" || exit 1
    done
    strip "$bin"/* && ls -l "$bin"
    ;;
check)
    export TESSERA_ROOT="$PWD" TESSERA_BIN="$bin/tessera" TESSERA_FILETESTS="$PWD/filetests"
    ! wanted lib || kept lib 240 "$bin/lib" --nocapture --test-threads=1 || failed=1
    ! wanted conformance || kept conformance 400 "$bin/conformance" --nocapture --test-threads=1 || failed=1
    for dtype in $(! wanted digests || echo bf16 fp8); do
        for ranks in 1 2; do
            kept "digest-$dtype-$ranks" 120 "$bin/tessera" bench dit --size 480x832,320x576 --layers 2 --warm 0 --steps 2 --digest \
                --dtype $dtype --mesh tp=$ranks || failed=1
            grep -o 'latent [0-9a-f]*' "$out/digest-$dtype-$ranks.txt" >"$out/latents-$ranks"
        done
        if ! [ -s "$out/latents-1" ] || ! [ -s "$out/latents-2" ]; then
            echo "latents in $dtype: not compared" && failed=1
        elif cmp -s "$out/latents-1" "$out/latents-2"; then
            echo "latents in $dtype: the same on one GPU and on two"
        else
            echo "latents in $dtype: OTHERS on one GPU than on two" && failed=1
        fi
        rm -f "$out/latents-1" "$out/latents-2"
    done
    if ! wanted block; then
        :
    elif python3 -c 'import torch' 2>/dev/null; then
        case=$(mktemp -d)
        kept block 240 sh -ec '
            python3 tools/bench/dit_gpu.py --layers 1 --size 128x256 --dump "$1"
            for limits in "bf16 0.02" "fp8 0.1"; do
                set -- "$1" "$2" $limits
                "$2" bench dit "$1" --case --dtype "$3" --size 128x256 --warm 0 --steps 1
                python3 tools/bench/check_case.py "$1" --limit "$4"
            done' block "$case" "$bin/tessera" || failed=1
        rm -rf "$case"
    else
        echo "block: not run, no PyTorch here"
        [ -z "$names" ] || failed=1
    fi
    ! wanted streams || kept streams 480 "$bin/streams" --nocapture --test-threads=1 || failed=1
    exit $failed
    ;;
trace)
    run="$bin/tessera bench dit --size 480x832,320x576 --warm 2 --steps 6 --trace 3"
    (CUDA_VISIBLE_DEVICES=0 && export CUDA_VISIBLE_DEVICES && kept timeline-tp1 200 $run --mesh tp=1) &
    one=$!
    (CUDA_VISIBLE_DEVICES=1 && export CUDA_VISIBLE_DEVICES && kept timeline-tp1-fp8 200 $run --mesh tp=1 --dtype fp8) || failed=1
    wait $one || failed=1
    kept timeline-tp2 200 $run --mesh tp=2 || failed=1
    exit $failed
    ;;
esac
