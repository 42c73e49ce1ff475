"""The one schema of a run: YAML files, the command line, Tune samples and checkpoints all speak these fields.

Every class is frozen and rejects unknown keys, NaN, infinities and values out of range with the field's name.
Values come from presets (``uno.presets``); the defaults here are the paper's CIFAR10 settings.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, model_validator
from tyro.conf import arg

from uno.errors import ConfigError
from uno.methods import METHODS

Probability = Annotated[float, Field(ge=0, le=1)]
Range = tuple[float, float]


class _Frozen(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True, protected_namespaces=()
    )


class DataConfig(_Frozen):
    """Where the images are, which classes are known, and how rows become batches."""

    source: Annotated[str, arg(aliases=["--data"])] = Field(
        "digits",
        description="digits, cifar10:DIR, cifar100:DIR, imagenet:DIR, folder:DIR, parquet:DIR, or a path.",
    )
    labeled: Annotated[str | None, arg(aliases=["--labeled"])] = Field(
        None,
        description="Folder with one subfolder per known class; use together with --unlabeled, not --data.",
    )
    unlabeled: Annotated[str | None, arg(aliases=["--unlabeled"])] = Field(
        None, description="Folder of images without labels, flat or nested; names are ignored."
    )
    known_classes: Annotated[str | None, arg(aliases=["--known-classes"])] = Field(
        None,
        description="Benchmark mode on labeled data: first:N, names with commas, or a text file of names.",
    )
    num_novel: Annotated[PositiveInt | Literal["auto"] | None, arg(aliases=["--num-novel"])] = Field(
        None, description="Classes to discover; auto estimates; default: as many as --known-classes hides."
    )
    imagenet_split: Literal["A", "B", "C"] = Field(
        "A",
        description="Which 30 held-out ImageNet classes are novel (imagenet:DIR without --known-classes).",
    )
    limit: Annotated[int | None, arg(aliases=["--limit"])] = Field(
        None, ge=1, description="Use at most this many rows of each split, spread evenly over the classes."
    )
    download: bool = Field(False, description="Allow cifar10:DIR and cifar100:DIR to download the data.")
    store_size: int = Field(32, ge=4, le=1024, description="Side of the stored square images, in pixels.")
    mean: tuple[float, float, float] = Field(
        (0.4914, 0.4822, 0.4465), description="Channel means subtracted after scaling to 0-1."
    )
    std: tuple[float, float, float] = Field(
        (0.2470, 0.2435, 0.2616), description="Channel standard deviations divided by after scaling to 0-1."
    )
    composition: Literal["proportional", "paired"] = Field(
        "proportional",
        description="Labeled to unlabeled rows of a batch: as in the data, or 1:1 (the shorter cycles).",
    )
    ingest: Literal["auto", "resident", "streaming"] = Field(
        "auto",
        description="resident: decode once, keep uint8 images in memory; streaming: decode in every epoch; "
        "auto: resident where the set fits.",
    )
    max_bad_fraction: Probability = Field(
        0.01, description="Stop when more than this share of images is unreadable."
    )

    @model_validator(mode="after")
    def _check(self) -> DataConfig:
        if (self.labeled is None) != (self.unlabeled is None):
            raise ValueError("labeled and unlabeled must be given together")
        if any(s <= 0 for s in self.std):
            raise ValueError("std must be positive")
        return self


class ViewConfig(_Frozen):
    """How one kind of view is cut from an image; probabilities of 0 switch an operation off."""

    num_views: int = Field(2, ge=0, le=8, description="Views of this kind per image.")
    size: int = Field(32, ge=4, le=1024, description="Side of the view in pixels.")
    crop: Literal["none", "pad", "resized", "pad_or_resized"] = Field(
        "pad_or_resized",
        description="Random crop after padding, random-resized crop, or one of the two at random.",
    )
    crop_padding: int = Field(
        4, ge=0, le=256, description="Zero padding on each side before a random crop, pixels."
    )
    crop_scale: Range = Field(
        (0.8, 1.0), description="Area of a random-resized crop, as a share of the image."
    )
    flip: Probability = Field(0.5, description="Probability of a horizontal flip.")
    affine: Probability = Field(0.0, description="Probability of a random affine map.")
    affine_degrees: float = Field(
        0.0, ge=0, le=180, description="Rotation is uniform in +- this many degrees."
    )
    affine_translate: Probability = Field(
        0.0, description="Shift is uniform in +- this share of the side, per axis."
    )
    affine_scale: Range = Field((1.0, 1.0), description="Range of the isotropic zoom.")
    affine_shear: float = Field(
        0.0, ge=0, le=60, description="Shear along x is uniform in +- this many degrees."
    )
    jitter: Probability = Field(0.5, description="Probability of colour jitter.")
    brightness: float = Field(0.3, ge=0, le=1, description="Brightness factor is uniform in 1 +- this.")
    contrast: float = Field(0.3, ge=0, le=1, description="Contrast factor is uniform in 1 +- this.")
    saturation: float = Field(0.15, ge=0, le=1, description="Saturation factor is uniform in 1 +- this.")
    hue: float = Field(
        0.1, ge=0, le=0.5, description="Hue shift is uniform in +- this share of the colour circle."
    )
    grey: Probability = Field(0.1, description="Probability of conversion to grey.")
    solarize: Probability = Field(0.0, description="Probability of solarize with a uniform random threshold.")
    equalize: Probability = Field(0.0, description="Probability of histogram equalization.")
    blur: Probability = Field(0.0, description="Probability of Gaussian blur.")
    blur_sigma: Range = Field((0.1, 2.0), description="Range of the blur's standard deviation, pixels.")

    @model_validator(mode="after")
    def _check(self) -> ViewConfig:
        for name in ("crop_scale", "affine_scale", "blur_sigma"):
            low, high = getattr(self, name)
            if not 0 < low <= high:
                raise ValueError(f"{name} must satisfy 0 < low <= high, got {low} {high}")
        if self.crop_scale[1] > 1:
            raise ValueError("crop_scale must not exceed 1")
        return self


class AugmentConfig(_Frozen):
    """The views of an image: large ones give pseudo-labels, small ones are only predicted (multi-crop)."""

    large: ViewConfig = ViewConfig()
    small: ViewConfig = ViewConfig(num_views=0, size=18, crop="resized", crop_scale=(0.3, 0.8))
    weak: bool = Field(False, description="Crop and flip only (the paper's weak augmentation, Tab. 2).")

    @model_validator(mode="after")
    def _check(self) -> AugmentConfig:
        if self.large.num_views < 2:
            raise ValueError("large.num_views must be at least 2: swapped prediction needs two views")
        return self


class ModelConfig(_Frozen):
    """Encoder and heads (paper Sec. 3.1, 3.3, 4.1)."""

    encoder: Literal["resnet_small", "resnet18", "resnet34", "resnet50"] = Field(
        "resnet18", description="Encoder architecture; resnet_small is He et al. 2016, Sec. 4.2."
    )
    stem: Literal["small", "imagenet"] = Field(
        "small",
        description="3x3 stride-1 convolution without pooling (small images), or torchvision's 7x7 stem.",
    )
    width: int = Field(16, ge=4, le=512, description="resnet_small: channels of the first stage.")
    blocks: int = Field(1, ge=1, le=18, description="resnet_small: residual blocks per stage.")
    num_heads: int = Field(4, ge=1, le=32, description="Cluster heads and overclustering heads, each (n).")
    overcluster_factor: int = Field(
        3,
        ge=0,
        le=50,
        description="Clusters of an overclustering head over novel classes (m); 0: no such heads.",
    )
    hidden_dim: int = Field(2048, ge=1, le=65536, description="Hidden units of a projection head.")
    projection_dim: int = Field(256, ge=1, le=16384, description="Outputs of a projection head.")
    weights: Annotated[str | None, arg(aliases=["--weights"])] = Field(
        None, description="Start discovery from this run directory or encoder .safetensors: no pretraining."
    )
    mlp_input: Literal["normalized", "raw"] = Field(
        "normalized",
        description="Projection heads read the l2-normalised feature (paper) or the raw one (v2).",
    )


class ObjectiveConfig(_Frozen):
    """The unified objective and its pseudo-labels (paper Sec. 3.1, 3.2)."""

    temperature: float = Field(0.1, gt=0, le=100, description="Softmax temperature tau.")
    epsilon: float = Field(0.05, ge=1e-4, le=10, description="Entropy weight of Sinkhorn-Knopp.")
    num_iters: int = Field(3, ge=1, le=1000, description="Sinkhorn-Knopp iterations.")
    aggregation: Literal["swap", "average_pseudo_labels", "average_logits"] = Field(
        "swap", description="How the views' pseudo-labels are combined (paper, appendix)."
    )
    concat: bool = Field(
        True, description="One softmax over known and novel outputs; off: two separate losses."
    )
    pseudo_labels: Literal["soft", "hard"] = Field("soft", description="Soft pseudo-labels, or their argmax.")
    iic_weight: float = Field(
        0,
        ge=0,
        le=100,
        description="IIC: pushes labeled and unlabeled rows' outputs apart (published: 0.05).",
    )
    iic_view_weight: float = Field(
        0, ge=0, le=100, description="IIC: pulls the outputs of an image's views together (published: 0.01)."
    )
    rkd_weight: float = Field(
        0,
        ge=0,
        le=100,
        description="rKD: distils the pretrained known head's outputs on unlabeled rows (0.1).",
    )
    rkd_temperature: float = Field(4, gt=0, le=100, description="Temperature of rKD's softmax, besides tau.")
    queue_size: int = Field(
        0,
        ge=0,
        le=10**6,
        description="Past unlabeled rows that Sinkhorn sees besides the batch's own, once warm-up is over.",
    )
    consistency_weight: float | None = Field(
        None, ge=0, le=10**4, description="Baselines: weight of the views' agreement; default: their paper's."
    )
    rampup: float | None = Field(
        None, ge=0, le=1, description="Baselines: share of the phase in which that weight rises."
    )


class PhaseConfig(_Frozen):
    """One training phase: SGD with momentum, linear warm-up, cosine decay."""

    epochs: int = Field(200, ge=0, le=100_000, description="Length of the phase in epochs.")
    base_lr: float = Field(0.1, gt=0, le=100, description="Learning rate after warm-up.")
    min_lr: float = Field(0.001, ge=0, le=100, description="Learning rate at the first and last step.")
    warmup_epochs: float = Field(10, ge=0, le=100_000, description="Length of the linear warm-up in epochs.")
    momentum: float = Field(0.9, ge=0, lt=1, description="SGD momentum.")
    weight_decay: float = Field(1e-4, ge=0, le=1, description="SGD weight decay, all parameters.")


class TrainConfig(_Frozen):
    """What both phases share."""

    batch_size: Annotated[int, arg(aliases=["--batch-size"])] = Field(
        512, ge=2, le=1_000_000, description="Global batch size in images, over all workers."
    )
    max_steps: Annotated[int | None, arg(aliases=["--max-steps"])] = Field(
        None, ge=1, description="Stop each phase after this many steps (schedules keep their full length)."
    )
    log_every: int = Field(50, ge=1, description="Steps between two lines of metrics.")
    checkpoint_every_epochs: int = Field(10, ge=1, description="Epochs between two checkpoints.")
    keep_checkpoints: int = Field(2, ge=1, description="Checkpoints kept per phase.")
    eval_batch_size: int = Field(1024, ge=1, description="Rows per evaluation batch on each worker.")


class ComputeConfig(_Frozen):
    """Where the run executes; may differ between a run and its resumption."""

    workers: Annotated[int, arg(aliases=["--workers"])] = Field(
        0, ge=0, le=4096, description="Ray Train workers; 0 trains in this process without Ray."
    )
    device: Annotated[Literal["auto", "cpu", "cuda"], arg(aliases=["--device"])] = Field(
        "auto", description="auto takes CUDA where there is one."
    )
    gpus_per_worker: Annotated[float, arg(aliases=["--gpus-per-worker"])] = Field(
        1.0, ge=0, le=16, description="GPUs reserved for each Ray worker when the device is cuda."
    )
    cpus_per_worker: float | None = Field(
        None, gt=0, description="CPUs reserved for each Ray worker; default min(1, (CPUs - 1) / workers)."
    )
    placement: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = Field(
        "PACK", description="Ray's strategy: workers on few nodes, or spread over many."
    )
    precision: Literal["auto", "fp32", "bf16"] = Field(
        "auto", description="Encoder and MLP arithmetic; auto is bf16 on CUDA and fp32 on the CPU."
    )
    compile: bool = Field(False, description="torch.compile the encoder; needs a C++ compiler, and a minute.")
    threads: int | None = Field(
        None, ge=1, description="CPU threads per worker; default: all cores / workers."
    )


class Config(_Frozen):
    """A whole run of pretraining and discovery."""

    preset: str = Field(
        "custom", description="Settings to start from; default digits, and custom where other data is given."
    )
    recipe: Literal["paper", "v2"] = Field(
        "paper", description="The paper's settings or the authors' improved ones."
    )
    method: str = Field("uno", description=f"Discovery method: {', '.join(METHODS)}.")
    seed: int = Field(0, ge=0, lt=2**31, description="Seed of every random number of the run.")
    output: str | None = Field(
        None, description="Run directory, a path or a URI; default runs/PRESET-seedSEED."
    )
    data: DataConfig = DataConfig()
    augment: AugmentConfig = AugmentConfig()
    model: ModelConfig = ModelConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    rotation: PhaseConfig = PhaseConfig(epochs=0, weight_decay=5e-4)
    pretrain: PhaseConfig = PhaseConfig()
    discover: PhaseConfig = PhaseConfig()
    train: TrainConfig = TrainConfig()
    compute: ComputeConfig = ComputeConfig()

    @model_validator(mode="after")
    def _check(self) -> Config:
        if self.method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)}, got {self.method!r}")
        for name in ("iic_weight", "iic_view_weight", "rkd_weight", "queue_size"):
            if self.method != "uno" and getattr(self.objective, name):
                raise ValueError(f"objective.{name} belongs to method uno, not to {self.method}")
        return self


RESUMABLE_CHANGES = (
    "output", "compute", "train.log_every", "train.keep_checkpoints", "train.checkpoint_every_epochs",
    "train.eval_batch_size",
)  # fmt: skip
"""Keys (or prefixes) that may differ between a run and its resumption: they do not change what is learnt."""


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mapping -> ``{"objective.epsilon": 0.05, ...}``."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def to_dict(config: Config) -> dict[str, Any]:
    """Plain nested dict with lists instead of tuples, fit for YAML and JSON."""
    return config.model_dump(mode="json")


def field_names() -> list[str]:
    """Dotted names of all fields, in order."""
    return list(flatten(to_dict(Config())))


def override(config: Config, overrides: Mapping[str, Any]) -> Config:
    """``config`` with dotted keys replaced, e.g. ``{"objective.epsilon": 0.1}``.

    Raises:
        ConfigError: unknown key (with the nearest known one), value of the wrong type or out of range.
    """
    tree = to_dict(config)
    known = set(field_names())
    for key, value in flatten(overrides).items():
        if key not in known:
            fields = [name for name in field_names() if name.startswith(f"{key}.")]
            if fields and value is None:  # a section whose lines are all commented out
                continue
            if fields:
                raise ConfigError(f"{key!r} is a section of keys such as {fields[0]!r} (got {value!r})")
            near = difflib.get_close_matches(key, known, n=1)
            raise ConfigError(f"unknown key {key!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
        *parents, leaf = key.split(".")
        node = tree
        for parent in parents:
            node = node[parent]
        node[leaf] = value
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(describe(error)) from None


def describe(error: ValidationError) -> str:
    """One line for the first problem pydantic found: ``objective.epsilon: ... (got -1)``."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"] if str(part).isidentifier() or isinstance(part, int))
    message = first["msg"].removeprefix("Value error, ")
    got = "" if isinstance(first["input"], Mapping | BaseModel) else f" (got {reprlib.repr(first['input'])})"
    return f"{where}: {message}{got}" if where else message


def differing_keys(old: Mapping[str, Any], new: Config) -> list[str]:
    """Dotted keys in which a stored config tree and ``new`` differ, without :data:`RESUMABLE_CHANGES`.

    ``data.ingest: auto`` differs from nothing: a run stores what it was decided to be.
    """
    a, b = flatten(old), flatten(to_dict(new))
    keys = [k for k in sorted(a.keys() | b.keys()) if a.get(k) != b.get(k)]
    if "auto" in (a.get("data.ingest"), b.get("data.ingest")):
        keys = [k for k in keys if k != "data.ingest"]
    return [k for k in keys if not any(k == free or k.startswith(free + ".") for free in RESUMABLE_CHANGES)]


def config_hash(config: Config) -> str:
    """Hash of everything that changes what is learnt (12 hex digits)."""
    flat = flatten(to_dict(config))
    kept = {
        k: v for k, v in flat.items() if not any(k == f or k.startswith(f + ".") for f in RESUMABLE_CHANGES)
    }
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:12]


MAX_CONFIG_BYTES = 1_000_000
MAX_CONFIG_DEPTH = 20


def load_yaml(path: str | Path) -> dict[str, Any]:
    """Overrides from a YAML file; nested mappings and dotted keys both work.

    Raises:
        ConfigError: missing file, larger than 1 MB, not YAML, not a mapping, or with aliases or deep nesting.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_CONFIG_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise ConfigError(f"cannot read config file {path}: {getattr(error, 'strerror', error)}") from None
    if len(data) > MAX_CONFIG_BYTES:
        raise ConfigError(f"config file {path} is larger than {MAX_CONFIG_BYTES} bytes")
    try:
        text = data.decode()
        refuse_yaml_bombs(text)
        tree = yaml.safe_load(text) or {}
    except (
        yaml.YAMLError,
        ValueError,
    ) as error:  # ValueError: not UTF-8, month 13, an integer of 5000 digits
        raise ConfigError(f"config file {path}: {' '.join(str(error).split())}") from None
    if not isinstance(tree, Mapping):
        raise ConfigError(f"config file {path} must hold a mapping of keys, not a {type(tree).__name__}")
    return flatten(tree)


def refuse_yaml_bombs(text: str) -> None:
    """Raise ValueError for what takes YAML without bound: aliases grow 2^n-fold, 20 kB of ``[`` take 35 s."""
    depth = 0
    for event in yaml.parse(text):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if isinstance(event, yaml.AliasEvent):
            raise ValueError("YAML aliases (*name) are not accepted; write the values out")
        if depth > MAX_CONFIG_DEPTH:
            raise ValueError(f"nested deeper than {MAX_CONFIG_DEPTH} levels")


def dump_yaml(config: Config) -> str:
    """The resolved configuration as YAML, loadable by :func:`load_yaml`."""
    return yaml.safe_dump(to_dict(config), sort_keys=False, default_flow_style=None, width=110)
