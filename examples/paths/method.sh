#!/bin/sh
# A method of your own, from the root of this repository: sh examples/paths/method.sh FOLDER [more options of uno discover]
set -e
export FOLDER="$1" ROOT="$PWD"
shift

# 1. Start from the example, 40 lines: edit FOLDER/my_method.py.
mkdir -p "$FOLDER" && cp examples/my_method.py "$FOLDER" && cd "$FOLDER"
# 2. Take one step of each phase; nothing is kept.
uno discover --data digits --method my_method:METHOD --distill.entropy-weight 1 --dry-run "$@"
# 3. Train on the digits, 5 known and 5 new.
uno discover --data digits --method my_method:METHOD --distill.entropy-weight 1 --output run "$@"
# 4. Train UNO in the same way, and compare the two reports.
uno discover --data digits --method uno --output run-uno "$@"
