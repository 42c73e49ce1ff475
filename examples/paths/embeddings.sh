#!/bin/sh
# Embeddings of another tool, a Parquet file with columns id, embedding and a nullable label:
#   sh examples/paths/embeddings.sh FILE.parquet NUM [more options of uno discover]
set -e
export FILE="$1" NUM="$2"
shift 2

# 1. What a run would use.
uno data check --data "vectors:$FILE" --num-novel "$NUM"
# 2. Discover; an optional column path, image or text is what the report shows.
uno discover --data "vectors:$FILE" --num-novel "$NUM" --output runs/embeddings "$@"
# 3. A class for each id, as runs/classes/predictions.csv for the other tool.
uno predict runs/embeddings --data "vectors:$FILE" --output runs/classes --csv
