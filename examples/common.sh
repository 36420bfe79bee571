# What the examples share; they source it.  It sets `here`, `model`, `prompts`, `python` and `out`, and makes the folder `out`.
here=$(dirname "${BASH_SOURCE[0]}")
model=$here/tiny-moe-q8_0.gguf
prompts=$here/prompts
out=${1:-demo-out/$(basename "$0" .sh)}

# Commands as for a person who may copy them: words are quoted where a shell needs it.
show() {
  local word line='$'
  for word in "$@"; do
    [[ $word =~ ^[[:alnum:]_./:,=@%+-]+$ ]] || word=${word@Q}
    line+=" $word"
  done
  printf '\n%s\n' "$line"
}
step() { show "$@"; "$@"; }
# keep FILE COMMAND: what it prints also goes into the file
keep() { show "${@:2}"; "${@:2}" | tee "$1"; }

PATH=$PATH:$(CDPATH='' cd "$here/.." && pwd)/.venv/bin  # what `make demo` set up, where no other environment is active
if ! command -v bel-run > /dev/null; then
  echo "bel-run is not there: run \`make demo\` once, or activate the environment that has bel-toolkit[all]" >&2
  exit 5
fi
python=$(dirname "$(command -v bel-run)")/python3
[ -x "$python" ] || python=python3

if [ -n "$(ls -A "$out" 2> /dev/null)" ]; then
  echo "$out is not empty: remove it, or name another folder: $0 FOLDER" >&2
  exit 2
fi
mkdir -p "$out"
