#!/usr/bin/env bash
# The main job on the example model: repack it, verify it, restore it and compare; record which experts its router picks on
# code and on chat; measure this machine and plan which experts deserve the memory; and run the model from the bundle in half
# of its memory, with the tokens of stock llama.cpp.  Run by `make demo`.   examples/demo.sh [FOLDER]
set -euo pipefail
. "$(dirname "$0")/common.sh"

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
  step bel-profile record "$model" -f "$prompts/$work/${work}_01.txt" -f "$prompts/$work/${work}_02.txt" -n 100 --timing \
    --workload "$work" -o "$out/$work.json"
done
step bel-profile --merge "$out/code.json" "$out/chat.json" -o "$out/merged.json"
step bel-profile report "$out/code.trace" "$out/chat.trace" --html "$out/report.html"

step bel-profile simulate "$out/code.trace" --policy lru,lfu-decay:0.98,belady,static:"$out/chat.json" --fraction 0.25,0.5
step bel-profile bandwidth "$out/tiny-moe.bel" -o "$out/costs.json"
step bel-profile plan "$out/code.trace" "$out/chat.trace" --model "$out/tiny-moe.bel" --slots-bytes 2688k \
  --costs "$out/costs.json" --clock blocking -o "$out/plan.json"

prompt="def total(prices):"
step bel-run "$out/tiny-moe.bel" --plan "$out/plan.json" -p "$prompt" -n 60 --stats | tee "$out/bundle.txt"
step bel-run "$model" --stock -p "$prompt" -n 60 | tee "$out/stock.txt"
if ! cmp -s <(tail -n +3 "$out/bundle.txt") <(tail -n +3 "$out/stock.txt"); then
  echo "the bundle's text is not that of stock llama.cpp" >&2
  exit 1
fi
printf '\nThe bundle in half of its memory wrote the same text as stock llama.cpp.\n'
