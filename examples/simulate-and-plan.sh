#!/usr/bin/env bash
# What would a cache of experts hit, and how many slots should each layer have?  Simulate, plan, and run by the plan.
# Usage: examples/simulate-and-plan.sh [FOLDER]
set -euo pipefail
. "$(dirname "$0")/common.sh"

# The work: two prompts of code and two of chat, recorded as profile-and-merge.sh does.
for work in code chat; do
  step bel-profile record "$model" -f "$prompts/$work/${work}_01.txt" -f "$prompts/$work/${work}_02.txt" -n 60 \
    --workload "$work" -o "$out/$work.json"
done

# What four policies would have hit on code, with a quarter and with half of the experts in memory.  `belady` knows the
# future; `static` keeps the experts that chat uses most, which are the wrong ones.
step bel-profile simulate "$out/code.trace" --policy lru,lfu-decay:0.98,belady,static:"$out/chat.json" --fraction 0.25,0.5

# How much of the model would fit into a small machine without a GPU?  This reads the header only.
step bel-profile fit "$model" --vram 0 --ram 1G --context 512

# Share 2688 KiB, which hold half of the experts, out between the layers so that the fewest are missed.  (For the fewest
# seconds: record with --timing, measure this machine with `bel-profile bandwidth`, and give --costs, as demo.sh does.)
step bel-repack "$model" -o "$out/tiny-moe.bel"
step bel-profile plan "$out/code.trace" "$out/chat.trace" --model "$out/tiny-moe.bel" --slots-bytes 2688k --objective misses \
  -o "$out/plan.json"

# Run by the plan: half of the experts are in memory, and the text is that of stock llama.cpp with all of them.
prompt="def total(prices):"
keep "$out/planned.txt" bel-run "$out/tiny-moe.bel" --plan "$out/plan.json" -p "$prompt" -n 60 --stats
keep "$out/stock.txt" bel-run "$model" --stock -p "$prompt" -n 60
echo
step cmp "$out/planned.txt" "$out/stock.txt"

printf '\nThe plan is in %s; the two texts are the same.\n' "$out/plan.json"
