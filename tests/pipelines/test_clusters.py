"""What the cluster files ask of AWS, Kubernetes, SkyPilot and Anyscale, against what
these accept: no cloud, no Ray.
"""

import json
import re
import shlex
from functools import cache
from pathlib import PurePosixPath

import pytest
import yaml

from pipelines.commands import DISCOVER
from pipelines.options import parse
from tests.pages import page, section
from tests.pipelines.small import ROOT

AWS_FILES = ("cluster.yaml", "deploy/cluster-p5.yaml")
PAGE = page("docs/deploy/aws.md")
SUBMITTED = {"docs/deploy/ray.md": "Submit a job", "docs/deploy/aws.md": "Steps"}
RAY_VERSION = re.search(r"^ray==(\S+)", (ROOT / "constraints.txt").read_text(), re.M)[1]
# of node_config, not of RunInstances; Ray puts one of them in its place
OF_RAY = {"SubnetIds"}


@cache
def service_model(name):
    """The description of a service of AWS that its own clients work with."""
    from botocore.loaders import Loader
    from botocore.model import ServiceModel

    return ServiceModel(Loader().load_service_model(name, "service-2"))


def refusals(parameters, shape):
    """What Amazon's client would say before it sends anything; nothing where all is
    well.
    """
    from botocore.validate import ParamValidator

    return ParamValidator().validate(parameters, shape).generate_report()


def nodes(name):
    """The node types of a file, the head's first."""
    cluster = yaml.safe_load((ROOT / name).read_text())
    kinds = cluster["available_node_types"]
    return cluster, kinds.pop(cluster["head_node_type"]), kinds


def asked(kind):
    """What Ray would hand to RunInstances."""
    own = {
        key: value for key, value in kind["node_config"].items() if key not in OF_RAY
    }
    return own | {"MinCount": 1, "MaxCount": 1}


@pytest.mark.parametrize("name", AWS_FILES)
def test_every_field_of_a_node_is_one_of_ec2(name):
    """Kills: a field that EC2 does not know, a value of another type, at any depth."""
    shape = service_model("ec2").operation_model("RunInstances").input_shape
    _, head, workers = nodes(name)
    for kind in (head, *workers.values()):
        assert refusals(asked(kind), shape) == ""


@pytest.mark.parametrize("name", AWS_FILES)
def test_nodes_have_rights_an_image_a_group_and_one_zone(name):
    """Kills: workers without S3, Ray's image of 2022, a port 22 open to the world,
    nodes in several zones.
    """
    cluster, head, workers = nodes(name)
    for kind in (head, *workers.values()):
        config = kind["node_config"]
        assert re.fullmatch(
            r"resolve:ssm:/aws/service/deeplearning/ami/\S*ubuntu-2[24]\.04\S*|ami-\w+",
            config["ImageId"],
        )
        interfaces = config.get("NetworkInterfaces", [])
        groups = [interface["Groups"] for interface in interfaces] or [
            config["SecurityGroupIds"]
        ]
        assert all(group == ["sg-GROUP"] for group in groups)
        assert config["MetadataOptions"]["HttpTokens"] == "required"
    assert head["node_config"]["IamInstanceProfile"] != {"Name": "uno-worker"}
    for kind in workers.values():
        assert kind["node_config"]["IamInstanceProfile"] == {"Name": "uno-worker"}
        assert kind["node_config"]["Placement"] == {"GroupName": "uno"}
    assert re.fullmatch(
        r"[a-z]+-[a-z]+-\d[a-z]", cluster["provider"]["availability_zone"]
    )
    commands = [
        *cluster["head_start_ray_commands"],
        *cluster["worker_start_ray_commands"],
    ]
    starts = [command for command in commands if "ray start" in command]
    assert len(starts) == 2 and all("RAY_AUTH_MODE=token" in start for start in starts)
    assert cluster["file_mounts"] == {"/home/ray/.ray/auth_token": "~/.ray/auth_token"}
    # a node installs nothing
    assert cluster["setup_commands"] == cluster["worker_setup_commands"] == []


@pytest.mark.parametrize(
    "command",
    re.findall(r"^aws (?!ecr ).+?(?=\n(?:aws|docker|```))", PAGE, re.M | re.S),
)
def test_what_an_account_needs_is_what_aws_takes(command):
    """Kills: an operation or an option that does not exist, JSON that is none."""
    _, service, name, *words = shlex.split(command)
    title = "".join(part.title() for part in name.split("-"))
    shape = service_model(service).operation_model(title).input_shape
    members = {
        re.sub(r"(?<!^)(?=[A-Z][a-z])", "-", key).lower(): key for key in shape.members
    }
    parameters = {}
    for option, value in zip(words[::2], words[1::2], strict=True):
        assert option.startswith("--")
        key = members[option[2:]]
        if shape.members[key].type_name in ("list", "structure"):
            value = json.loads(value)
        if option.endswith("-document"):
            assert json.loads(value)["Version"] == "2012-10-17"
        parameters[key] = value
    assert refusals(parameters, shape) == ""


def test_the_names_of_the_account_are_those_of_the_files():
    """Kills: a profile or a placement group that a file wants and nobody makes."""
    made = set(
        re.findall(r"create-instance-profile --instance-profile-name (\S+)", PAGE)
    )
    groups = set(re.findall(r"create-placement-group --group-name (\S+)", PAGE))
    for name in AWS_FILES:
        cluster, head, workers = nodes(name)
        configs = [kind["node_config"] for kind in (head, *workers.values())]
        assert {config["IamInstanceProfile"]["Name"] for config in configs} == made
        assert {
            config["Placement"]["GroupName"]
            for config in configs
            if "Placement" in config
        } == groups
        assert cluster["docker"]["image"] in PAGE
        assert (
            cluster["docker"]["image"].partition("/")[0]
            in cluster["initialization_commands"][0]
        )


def test_the_anyscale_file_is_a_job_of_ours():
    """Kills: options that uno does not have, more workers than the nodes have GPUs, an
    output that the next attempt does not find.
    """
    job = yaml.safe_load((ROOT / "examples/anyscale.yaml").read_text())
    (group,) = job["compute_config"]["worker_nodes"]
    python, _, module, command, *words = shlex.split(job["entrypoint"])
    config = parse(words, DISCOVER).config
    assert (python, module, command) == ("python", "pipelines", "discover")
    assert (
        group["min_nodes"] <= group["max_nodes"]
        and config.compute.num_workers == 4 * group["max_nodes"]
    )
    assert (ROOT / job["containerfile"]).exists() and config.output.startswith(
        "/mnt/cluster_storage/"
    )


def test_the_image_has_the_tested_ray_the_extras_and_what_efa_loads():
    """Kills: `uno tune --search optuna` and timm: encoders that end with "pip install"
    on a cluster; a plugin for EFA that NCCL cannot load, and says so nowhere.
    """
    text = (ROOT / "deploy/Dockerfile").read_text()
    assert f"\nFROM rayproject/ray:{RAY_VERSION}-py311-gpu\n" in text
    extras = re.search(r"/home/ray/uno\[([\w,]+)\]", text)[1].split(",")
    assert {"ray", "optuna", "timm"} <= {*extras}
    assert {"libhwloc15", "libibverbs1", "librdmacm1"} <= {*text.split()}


def test_the_kubernetes_manifest_has_the_keys_of_its_api():
    """KubeRay's ray.io/v1 types and the names that its objects must share."""
    claim, job = yaml.safe_load_all((ROOT / "deploy/rayjob.yaml").read_text())
    assert (claim["kind"], job["apiVersion"], job["kind"]) == (
        "PersistentVolumeClaim",
        "ray.io/v1",
        "RayJob",
    )
    spec, cluster = job["spec"], job["spec"]["rayClusterSpec"]
    fields = (
        "entrypoint runtimeEnvYAML shutdownAfterJobFinishes ttlSecondsAfterFinished"
        " backoffLimit"
    )
    assert spec.keys() <= {*fields.split(), "rayClusterSpec"}
    assert "--output /" in spec["entrypoint"] and "--device cuda" in spec["entrypoint"]
    assert (
        int(
            yaml.safe_load(spec["runtimeEnvYAML"])["env_vars"][
                "RAY_JOB_STOP_WAIT_TIME_S"
            ]
        )
        >= 30
    )
    fields = (
        "rayVersion enableInTreeAutoscaling autoscalerOptions authOptions headGroupSpec"
        " workerGroupSpecs"
    )
    assert cluster.keys() <= {*fields.split()}
    assert cluster["enableInTreeAutoscaling"] and cluster["authOptions"] == {
        "mode": "token"
    }
    assert cluster["rayVersion"] == RAY_VERSION
    (workers,) = cluster["workerGroupSpecs"]
    assert workers["minReplicas"] <= workers["replicas"] <= workers["maxReplicas"]
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    pod = workers["template"]["spec"]
    resources = pod["containers"][0]["resources"]
    (toleration,) = pod["tolerations"]
    assert toleration == {
        "key": "nvidia.com/gpu",
        "operator": "Exists",
        "effect": "NoSchedule",
    }
    assert resources["limits"]["nvidia.com/gpu"] == 1
    # true without quotes is refused
    assert all(isinstance(v, str) for v in pod["nodeSelector"].values())
    for group in (cluster["headGroupSpec"], workers):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        pod = group["template"]["spec"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
        assert (
            volumes["runs"]["persistentVolumeClaim"]["claimName"]
            == claim["metadata"]["name"]
        )
        mounts = {
            mount["name"]: mount["mountPath"]
            for mount in pod["containers"][0]["volumeMounts"]
        }
        assert (
            mounts == {"runs": "/runs", "shm": "/dev/shm"}
            and mounts.keys() == volumes.keys()
        )


def submissions():
    """(file it is for, the words of ``python -m ...``) of every submitted command
    that the project shows.
    """
    texts = {name: (ROOT / name).read_text() for name in AWS_FILES}
    texts |= {name: section(name, title) for name, title in SUBMITTED.items()}
    for name, text in texts.items():
        plain = re.sub(r"^# ?", "", text, flags=re.M).replace("\\\n", " ")
        for words in re.findall(r"python -m (pipelines .+)", plain):
            yield ("cluster.yaml" if name in SUBMITTED else name), shlex.split(words)
    job = list(yaml.safe_load_all((ROOT / "deploy/rayjob.yaml").read_text()))[1]
    yield (
        "deploy/rayjob.yaml",
        shlex.split(job["spec"]["entrypoint"].partition("python -m ")[2]),
    )


def mounts(name):
    """Directories that every node of a file shares."""
    if name == "deploy/rayjob.yaml":
        job = list(yaml.safe_load_all((ROOT / name).read_text()))[1]
        group = job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["template"]["spec"]
        claims = {v["name"] for v in group["volumes"] if "persistentVolumeClaim" in v}
        return [
            m["mountPath"]
            for m in group["containers"][0]["volumeMounts"]
            if m["name"] in claims
        ]
    docker = yaml.safe_load((ROOT / name).read_text())["docker"]
    return [
        option.rpartition(":")[2]
        for option in docker["run_options"]
        if option.startswith("-v ")
    ]


@pytest.mark.parametrize(("name", "words"), list(submissions()))
def test_submitted_commands_parse_and_name_what_all_nodes_see(name, words):
    """Kills: data or a run directory that no file mounts, a flag that does not
    exist.
    """
    assert words[:2] == ["pipelines", "discover"]
    config = parse(words[2:], DISCOVER).config
    data = config.data.source.partition(":")[2]
    for place in (data, config.output):
        shared = any(
            PurePosixPath(place).is_relative_to(mount) for mount in mounts(name)
        )
        assert place.startswith("s3://") or shared, place
    assert config.compute.device == "cuda" and config.compute.num_workers
