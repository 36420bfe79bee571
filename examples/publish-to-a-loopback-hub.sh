#!/usr/bin/env bash
# Publish a bundle and fetch it as a stranger would, without leaving this machine: a small hub listens on 127.0.0.1.
# For the real hub: leave out the hub and its four settings, log in with `hf auth login`, and use an ORG of yours.
# Usage: examples/publish-to-a-loopback-hub.sh [FOLDER]
set -euo pipefail
. "$(dirname "$0")/common.sh"

# The hub of the tests.  It prints its address, keeps everything in memory, and ends with this script.
coproc hub { exec "$python" "$here/../tests/hub_server.py"; }
read -r HF_ENDPOINT <&"${hub[0]}"
export HF_ENDPOINT HF_TOKEN=hf_any HF_HUB_DISABLE_XET=1 HF_HOME=$out/home NO_PROXY='*'
echo "a hub listens at $HF_ENDPOINT"

step bel-repack "$model" -o "$out/tiny-moe.bel"

# What would be uploaded?  The licence and the base model, which this file does not name, are given by options.
terms=(--license mit --base-model example/tiny-moe)
step bel-repack publish "$out/tiny-moe.bel" --repo-id example/tiny-moe-bel "${terms[@]}" --dry-run

# Upload: every byte is verified first, and the manifest goes last.
step bel-repack publish "$out/tiny-moe.bel" --repo-id example/tiny-moe-bel "${terms[@]}"

# On another machine: first what is enough to see what would fit there, then the experts.
step bel-repack fetch example/tiny-moe-bel -o "$out/fetched.bel" --dense-only
step bel-profile fit "$out/fetched.bel" --vram 0 --ram 1G --context 512
step bel-repack fetch example/tiny-moe-bel -o "$out/fetched.bel"

# What was fetched is the bundle: every byte is right, and the original comes out of it.
step bel-repack verify "$out/fetched.bel" --source "$model"
step bel-repack restore "$out/fetched.bel" -o "$out/restored"
step cmp "$model" "$out/restored/$(basename "$model")"

printf '\nThe model that was published is the one that came back.\n'
