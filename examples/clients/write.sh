#!/usr/bin/env bash
# Has the writer go on with a text, and prints what it writes as it comes:
#   examples/clients/write.sh [--url HOST:PORT] ["json.dumps(" [CHARACTERS]]
set -euo pipefail

url=localhost:8000
while (($#)); do
  case $1 in
    --url=*) url=${1#--url=}; shift ;;
    --url) url=${2:?--url needs HOST:PORT}; shift 2 ;;
    -*) echo "usage: write.sh [--url HOST:PORT] [TEXT [CHARACTERS]]" >&2; exit 2 ;;
    *) break ;;
  esac
done
text=${1-The } count=${2:-400}

# The model takes and gives the codes of characters.
prompt=$(printf %s "$text" | od -An -v -tu1 | xargs | tr ' ' ,)
printf %s "$text"
curl -sSN --fail-with-body "http://$url/v2/models/writer/generate_stream" -d "{\"prompt\": [$prompt], \"count\": $count}" |
  while IFS= read -r event || [[ -n $event ]]; do
    case $event in
      *'"character":'*) code=${event##*'"character":'}; printf %b "\\0$(printf %o "${code%%[!0-9]*}")" ;;
      *'"error":'*) echo "$event" >&2; exit 1 ;;
    esac
  done
echo
