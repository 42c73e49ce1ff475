#!/bin/sh
# From labeled photographs and a pile of others to a folder for each class. The pile holds about NUM new classes:
#   sh examples/session.sh KNOWN_FOLDER PILE_FOLDER RUN_FOLDER NUM [more options of uno discover]
set -e
export KNOWN="$1" PILE="$2" RUN="$3" NUM="$4"
shift 4

uno data check --labeled "$KNOWN" --unlabeled "$PILE" --num-novel "$NUM" "$@"
uno discover --labeled "$KNOWN" --unlabeled "$PILE" --num-novel "$NUM" --output "$RUN" "$@"

# Look: open $RUN/report.html. Its pictures are the classes; it can also save what the next lines do.
uno classes "$RUN"
uno classes "$RUN" --rename novel-1=first
sed -i.bak '/name: novel-2$/{n;s/keep/merge into first/;}' "$RUN/classes.yaml"
uno classes "$RUN" --apply
sed -i.bak '/name: novel-3$/{n;s/keep/drop/;}' "$RUN/classes.yaml"
uno classes "$RUN" --apply

uno evaluate "$RUN"
uno report "$RUN"
uno predict "$RUN" --data "$PILE" --output "$RUN-sorted" --csv --folders
