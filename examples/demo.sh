#!/usr/bin/env bash
# The main job on the example model: repack it, look at it, verify it, restore it, and compare.  Run by `make demo`.
set -euo pipefail
cd "$(dirname "$0")/.."
model=examples/tiny-moe-q8_0.gguf
out=${1:-demo-out}
rm -rf "$out"
mkdir -p "$out"

step() { printf '\n$ %s\n' "$*"; "$@"; }

step bel-repack "$model" -o "$out/tiny-moe.bel"
step bel-repack verify "$out/tiny-moe.bel" --source "$model"
step bel-repack restore "$out/tiny-moe.bel" -o "$out/restored"

want=$(sha256sum < "$model" | cut -d' ' -f1)
have=$(sha256sum < "$out/restored/tiny-moe-q8_0.gguf" | cut -d' ' -f1)
printf '\nsha256 of the original  %s\nsha256 of the restored  %s\n' "$want" "$have"
if [ "$want" != "$have" ]; then
  echo "the restored file differs" >&2
  exit 1
fi
echo "equal, byte for byte"
