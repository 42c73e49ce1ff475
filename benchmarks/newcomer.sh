#!/bin/sh
# Seconds in which a newcomer reaches a report of their own images, from nothing, in a new folder below this one:
#   sh benchmarks/newcomer.sh REPOSITORY KNOWN_FOLDER UNLABELED_FOLDER NUM [more options of uno discover]
set -e
repository="$1" known="$2" unlabeled="$3" num="$4"
shift 4
start=$(date +%s)
reached() { echo "newcomer: $(($(date +%s) - start)) s: $1"; }

folder=$(mktemp -d ./newcomer-XXXXXX)
git clone -q "$repository" "$folder/uno-on-ray"
cd "$folder/uno-on-ray"
make demo
reached "the report of the demo, installation included"
. .venv/bin/activate
uno data check --labeled "$known" --unlabeled "$unlabeled" --num-novel "$num"
reached "their images are checked"
uno discover --labeled "$known" --unlabeled "$unlabeled" --num-novel "$num" --output runs/photos "$@"
reached "the report of their images: $folder/uno-on-ray/runs/photos/report.html"
