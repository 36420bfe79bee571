#!/usr/bin/env bash
# Run a model under a limit on memory that the kernel keeps, where this machine lets us set one; where not, say so.
# The example model is so small that stock llama.cpp fits as well: what a cap does to a large one is in the README.
# Usage: examples/run-under-a-cap.sh [FOLDER]
set -euo pipefail
. "$(dirname "$0")/common.sh"
prompt="def total(prices):"

step bel-repack "$model" -o "$out/tiny-moe.bel"

# Two ways to cap a command at 128 MiB: a scope of systemd for this user, or a control group of our own (as root).
with_systemd=(systemd-run --user --scope --quiet -p MemoryMax=128M -p MemorySwapMax=0 --)
with_group=("$python" "$here/../tests/bench/capped.py" 128M)

# A cap counts here only if it ends a process that takes twice as much: systems exist that accept a limit and ignore it.
is_a_cap() {
  "$@" "$python" -c 'pass' && ! "$@" "$python" -c 'b"x" * (256 << 20)'
} > /dev/null 2>&1

capped=()
if is_a_cap "${with_systemd[@]}"; then
  capped=("${with_systemd[@]}")
elif is_a_cap "${with_group[@]}"; then
  capped=("${with_group[@]}")
fi

if [ ${#capped[@]} -gt 0 ]; then
  printf '\nCapped at 128 MiB by the kernel: a process that takes 256 MiB was ended under this cap.\n'
else
  printf '\nNOT CAPPED: this machine lets this user set no limit that holds.  What follows shows only that bel-run keeps to --ram.\n'
fi

# --ram is for the whole process, interpreter and libraries included; --stats shows the peak.
keep "$out/bundle.txt" ${capped[@]+"${capped[@]}"} bel-run "$out/tiny-moe.bel" --ram 96M --context 512 -p "$prompt" -n 60 --stats

# Stock llama.cpp without a cap: the same text.
keep "$out/stock.txt" bel-run "$model" --stock --context 512 -p "$prompt" -n 60
echo
step cmp "$out/bundle.txt" "$out/stock.txt"

printf '\nThe two texts are the same.\n'
