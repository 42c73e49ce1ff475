#!/bin/sh
# The CIFAR100 rows of the paper's comparison: sh examples/paths/paper.sh DATA_FOLDER [more options of uno reproduce]
set -e
export DATA="$1"
shift

# 1. Cells and epochs, before anything is downloaded; a GPU is wanted for the cells.
uno reproduce sota --scale full --datasets cifar100-20 --rows uno kmeans --dry-run
# 2. Download CIFAR100 into DATA (torchvision, checksum) and check it.
uno data check --preset cifar100-20 --data "cifar100:$DATA" --data.download true
# 3. Train and compare: three seeds beside the published numbers. The same command continues.
uno reproduce sota --scale full --datasets cifar100-20 --rows uno kmeans --cifar100 "$DATA" --output runs/paper "$@"
