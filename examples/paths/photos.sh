#!/bin/sh
# Photos in labeled folders and a folder of unlabeled ones, with about NUM new classes among them:
#   sh examples/paths/photos.sh KNOWN_FOLDER UNLABELED_FOLDER NUM [more options of uno discover]
set -e
export KNOWN="$1" UNLABELED="$2" NUM="$3"
shift 3

# 1. What a run would use, and what is wrong with the images.
uno data check --labeled "$KNOWN" --unlabeled "$UNLABELED" --num-novel "$NUM"
# 2. Discover, on features of a pretrained encoder. Then open runs/photos/report.html.
uno discover --labeled "$KNOWN" --unlabeled "$UNLABELED" --num-novel "$NUM" --weights pretrained --output runs/photos "$@"
# 3. Name a class that the report shows.
uno classes runs/photos --rename novel-1=first
# 4. Sort new photos into a folder for each class.
uno predict runs/photos --data "$UNLABELED" --output runs/sorted --folders
