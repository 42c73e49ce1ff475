#!/bin/sh
# A training job on Kubernetes, from the root of this repository: sh examples/paths/kuberay.sh IMAGE
# You need kubectl for a cluster with GPU nodes and a ReadWriteMany storage class, helm, docker, and CIFAR100 in
# /runs/data of the volume.
set -e
export IMAGE="$1"

# 1. The image of every node, in your registry.
docker build --file deploy/Dockerfile --tag "$IMAGE" . && docker push "$IMAGE"
# 2. KubeRay's operator; older ones ignore the tokens of deploy/rayjob.yaml.
helm install kuberay-operator kuberay-operator --repo https://ray-project.github.io/kuberay-helm/ --version 1.5.1
# 3. The volume and the job. Adapt sizes, labels and tolerations in deploy/rayjob.yaml first.
sed "s|image: IMAGE|image: $IMAGE|" deploy/rayjob.yaml | kubectl apply -f -
# 4. Its output. Apply the job again to continue after an interruption.
kubectl logs -f -l job-name=uno
