#!/bin/sh
# From labeled photographs and unlabeled ones to a folder for each class. The unlabeled set has about NUM new classes:
#   sh examples/session.sh KNOWN_FOLDER UNLABELED_FOLDER RUN_FOLDER NUM [more options of uno discover]
set -e
export KNOWN="$1" UNLABELED="$2" RUN="$3" NUM="$4"
shift 4

uno data check --labeled "$KNOWN" --unlabeled "$UNLABELED" --num-novel "$NUM" "$@"
uno discover --labeled "$KNOWN" --unlabeled "$UNLABELED" --num-novel "$NUM" --output "$RUN" "$@"

# Look: open $RUN/report.html. Its pictures are the classes; it can also save what the next lines do.
uno classes "$RUN"
uno classes "$RUN" --rename novel-1=first
sed -i.bak '/name: novel-2$/{n;s/keep/merge into first/;}' "$RUN/classes.yaml"
uno classes "$RUN" --apply
sed -i.bak '/name: novel-3$/{n;s/keep/drop/;}' "$RUN/classes.yaml"
uno classes "$RUN" --apply

uno evaluate "$RUN"
uno report "$RUN"
uno predict "$RUN" --data "$UNLABELED" --output "$RUN-sorted" --csv --folders
