#!/usr/bin/env bash
# What is in a GGUF, the bundle that is made of it, the way back, and what a damaged byte is told as.
# Usage: examples/convert-and-inspect.sh [FOLDER]
set -euo pipefail
. "$(dirname "$0")/common.sh"

# What is in the model?  This reads the header only.
step bel-repack inspect "$model"

# Convert it.  Every byte of the bundle is read back and checked before it gets its name.
step bel-repack "$model" -o "$out/tiny-moe.bel"

# Look at the bundle; --json is for programs.
step bel-repack inspect "$out/tiny-moe.bel"
keep "$out/inspect.json" bel-repack inspect "$out/tiny-moe.bel" --json

# Compare the bundle with the original, byte for byte.
step bel-repack verify "$out/tiny-moe.bel" --source "$model"

# Get the original back.  Its content digest is that of the bundle, and it is the same file.
step bel-repack restore "$out/tiny-moe.bel" -o "$out/restored"
step bel-repack inspect "$out/restored/$(basename "$model")" --digest
step cmp "$model" "$out/restored/$(basename "$model")"

# Overwrite one byte of an expert in a copy: the layer and the expert are named, and the exit status is 4.
step cp -r "$out/tiny-moe.bel" "$out/damaged.bel"
printf '\377' | dd of="$out/damaged.bel/tiny-moe-q8_0-experts.bin" bs=1 seek=1150976 conv=notrunc status=none
status=0
step bel-repack verify "$out/damaged.bel" || status=$?
if [ "$status" != 4 ]; then
  echo "verify of a damaged bundle ended with $status, not with 4" >&2
  exit 1
fi

printf '\nThe restored file is the original; the damage was found.\n'
