#!/usr/bin/env bash
# The main job on the example model: repack it, verify it, restore it and compare; then record which experts its router
# picks on code and on chat, merge the two profiles, and report.  Run by `make demo`.
set -euo pipefail
cd "$(dirname "$0")/.."
model=examples/tiny-moe-q8_0.gguf
prompts=examples/prompts
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

for work in code chat; do
  step bel-profile record "$model" -f "$prompts/$work/${work}_01.txt" -f "$prompts/$work/${work}_02.txt" -n 100 \
    --workload "$work" -o "$out/$work.json"
done
step bel-profile --merge "$out/code.json" "$out/chat.json" -o "$out/merged.json"
step bel-profile report "$out/code.trace" "$out/chat.trace" --html "$out/report.html"
