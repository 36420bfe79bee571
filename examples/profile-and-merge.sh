#!/usr/bin/env bash
# Which experts does the router pick on code, and which on chat?  Record both, merge them, and read the report.
# Usage: examples/profile-and-merge.sh [FOLDER]
set -euo pipefail
. "$(dirname "$0")/common.sh"

# Run two prompts of each kind of work and record every choice of the router.  Each run writes a trace (every choice in order)
# and the profile of it (counts).
for work in code chat; do
  step bel-profile record "$model" -f "$prompts/$work/${work}_01.txt" -f "$prompts/$work/${work}_02.txt" -n 60 \
    --workload "$work" -o "$out/$work.json"
done

# One profile for both kinds of work, which stay apart inside.  Each counts the same, whatever was recorded of it.
step bel-profile --merge "$out/code.json" "$out/chat.json" -o "$out/merged.json"

# Profiles are enough for the shares of the experts; the order of the choices, which caches depend on, is in the traces.
step bel-profile report "$out/code.trace" "$out/chat.trace" --html "$out/report.html"

printf '\nThe figures are in %s\n' "$out/report.html"
