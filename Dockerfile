# The environment of every node, for cluster.yaml, cluster-p5.yaml and rayjob.yaml:
#
#   docker build --tag IMAGE . && docker push IMAGE
#
# A job's own code comes with `ray job submit --working-dir .` and is found before what is installed here. boto3 is what
# the head starts nodes with. About 20 GB; where nodes must be ready sooner, bake it into the AMI (docs/deploy/aws.md).
FROM rayproject/ray:2.60.0-py311-gpu
# What NCCL's plugin for EFA loads beside libfabric (cluster-p5.yaml): without it NCCL falls back to sockets.
RUN sudo apt-get update && sudo apt-get install --yes --no-install-recommends libhwloc15 libibverbs1 librdmacm1 \
    && sudo rm -rf /var/lib/apt/lists/*
COPY --chown=ray:users . /home/ray/uno
RUN pip install --no-cache-dir --constraint /home/ray/uno/constraints.txt '/home/ray/uno[ray,optuna,timm]' boto3
