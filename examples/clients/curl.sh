#!/usr/bin/env bash
# A handwritten digit, in and out as JSON:  examples/clients/curl.sh [--url HOST:PORT]
set -euo pipefail

url=localhost:8000
while (($#)); do
  case $1 in
    --url=*) url=${1#--url=}; shift ;;
    --url) url=${2:?--url needs HOST:PORT}; shift 2 ;;
    *) echo "usage: curl.sh [--url HOST:PORT]" >&2; exit 2 ;;
  esac
done

# A seven, 8 x 8 pixels from 0 (paper) to 16 (ink).
image='
   0,  0,  1,  9, 16, 16,  3,  0,
   0,  0, 14, 11,  8, 16,  8,  0,
   0,  0,  4,  0,  0, 15,  6,  0,
   0,  0,  0,  0,  7, 16,  3,  0,
   0,  0,  6, 12, 16, 16,  9,  0,
   0,  1, 16, 14, 16,  5,  0,  0,
   0,  0,  2,  8, 16,  0,  0,  0,
   0,  0,  0, 12,  7,  0,  0,  0'

answer=$(curl -sS --fail-with-body "http://$url/v2/models/digits/infer" -H 'Content-Type: application/json' --data-binary @- <<EOF
{"inputs": [{"name": "image", "datatype": "FP32", "shape": [1, 64], "data": [$image]}]}
EOF
) || { echo "$answer" >&2; exit 1; }
echo "$answer"

# The digit is the index of the largest logit.
predicted=$(sed 's/.*"data": *\[\([^]]*\)\].*/\1/' <<<"$answer" | tr ',' '\n' |
  awk 'NR == 1 || $1 + 0 > top { top = $1 + 0; digit = NR - 1 } END { print digit }')
echo "predicted $predicted, label 7"
[ "$predicted" = 7 ]
