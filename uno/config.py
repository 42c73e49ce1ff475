"""The schema of the configuration: all settings of a run, with defaults and limits.

YAML files, the command line, Tune samples and checkpoints use these fields. Every class
is frozen. Unknown keys, NaN, infinities and values out of range are refused, and the
error names the field. Defaults are the paper's settings for CIFAR10, and presets
(:mod:`uno.presets`) change them. What the rest of the program must know about a field
is declared with it (:class:`FieldTraits`).
"""

from __future__ import annotations

import hashlib
import json
import re
import reprlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo

from uno.errors import ConfigError, did_you_mean, one_line
from uno.imports import OBJECT_NAME, check_origin, is_object_name
from uno.limits import (
    MAX_CONFIG_BYTES,
    MAX_CONFIG_DEPTH,
    MAX_CONFIG_VALUES,
    MAX_QUEUE_ROWS,
    MAX_THREADS,
)
from uno.method import (
    DEFAULT,
    METHODS,
    PRETEXTS,
    load,
    load_pretext,
    section,
    section_model,
)


class FieldTraits(NamedTuple):
    """What the program must know about a field besides its type, default and limits.

    The traits of a section hold for its fields, unless a field has its own.

    Attributes:
        scope: What the field changes: ``pretrain`` pretraining and what follows;
            ``discover`` only discovery; ``run`` how a run is logged and kept; ``place``
            where it executes. Fields with the last two may change when a run resumes.
        flag: The short form on the command line, without dashes; None if there is none.
        commands: The commands that take the field besides training, with spaces
            between.
        fixed_by: The command that does not take the field, because it decides it.
        search: The members of :class:`tune.spaces.Domain` with which the named spaces
            of ``uno tune`` search the field; True if only a space of the user's own can
            search it; False if all trials of a sweep must have the same value.
    """

    scope: Literal["pretrain", "discover", "run", "place"] = "pretrain"
    flag: str | None = None
    commands: str = ""
    fixed_by: str = ""
    search: Mapping[str, Any] | bool = True


def field(default: Any, sentence: str = "", **more: Any) -> Any:
    """Declare a field of the configuration, as pydantic's ``Field`` does.

    Args:
        default: The default value.
        sentence: The sentence that explains the field on the command line.
        **more: Members of :class:`FieldTraits`, such as ``flag`` and ``scope``, and
            other arguments of pydantic's ``Field``, such as the limit ``ge=0``.

    Returns:
        What pydantic's ``Field`` returns, to be assigned to the field in the body of a
        :class:`Section`. The sentence is its ``description``. The given members of
        :class:`FieldTraits` are a dict in its ``json_schema_extra``, from which
        :func:`field_traits` reads them.
    """
    about = {name: more.pop(name) for name in FieldTraits._fields if name in more}
    return Field(default, description=sentence, json_schema_extra=about, **more)


OWN_ENCODERS = ("resnet_small", "resnet18", "resnet34", "resnet50")
HUB_ENCODER = r"timm:hf-hub:[\w.\-]+/[\w.\-]+(@[\w.\-]+)?"
LIBRARY_ENCODER = rf"(torchvision|timm):[\w.\-]+|{HUB_ENCODER}|{OBJECT_NAME}"
REPORTERS = ("tensorboard", "wandb", "mlflow", "jsonl")
# The kind of source, the preset and the encoder of data that consists of vectors.
VECTORS = "vectors"
COLUMNS = ("image", "label", "id", "split", "eval_label", "embedding")
Probability = Annotated[float, Field(ge=0, le=1)]
Range = tuple[float, float]


class Section(BaseModel):
    """A part of the configuration.

    The constants of a method are a subclass of it.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        validate_default=True,
        protected_namespaces=(),
    )


class DataConfig(Section):
    """Where the images are, which classes are known, and how rows become batches."""

    source: str = field(
        "digits",
        "digits, cifar10:DIR, cifar100:DIR, imagenet:DIR, folder:DIR, imagefolder:DIR,"
        " parquet:DIR, tar:DIR, vectors:FILE_OR_DIR (embeddings), or a path.",
        flag="data",
        commands="predict report",
        fixed_by="reproduce",
    )
    labeled: str | None = field(
        None,
        "Folder with one subfolder per known class; with --unlabeled, not --data.",
        flag="labeled",
        commands="predict report",
        fixed_by="reproduce",
    )
    unlabeled: str | None = field(
        None,
        "Folder of images without labels, flat or nested; names are ignored.",
        flag="unlabeled",
        commands="predict report",
        fixed_by="reproduce",
    )
    known_classes: str | None = field(
        None,
        "Hide the other labels: first:N, names with commas, or a text file of names.",
        flag="known-classes",
    )
    num_novel: PositiveInt | Literal["auto"] | None = field(
        None,
        "Classes to discover; auto estimates; default: what --known-classes hides.",
        flag="num-novel",
        scope="discover",
    )
    setting: Literal["auto", "ncd", "gcd"] = field(
        "auto",
        "Setting of the unlabeled set. ncd: new classes only; gcd: known and new"
        " classes; auto: ncd where --known-classes hides labels, gcd where images have"
        " no label, since ncd would force an image of a known class into a new one.",
        flag="setting",
        scope="discover",
    )
    unlabeled_known_fraction: float = field(
        0.0,
        "GCD benchmark: fraction of each known class whose labels are hidden (1 -"
        " prop_train_labels).",
        ge=0,
        lt=1,
    )
    columns: str | None = field(
        None,
        "Your names of a table's columns, of path (or image), label, id, split,"
        " eval_label, embedding: path=file,label=kind.",
        commands="predict report",
    )
    labels: str | None = field(
        None,
        "File with labels that people have given, in place of those of the source: a"
        " table with id and label, or an export of Label Studio, FiftyOne or CVAT.",
    )
    image_folder: str | None = field(
        None,
        "Folder that the image paths of a table are relative to; default: the table's"
        " folder.",
        commands="predict report",
    )
    image_suffix: str | None = field(
        None,
        "Ending that is added to image paths of a table that lack it, such as .jpg.",
        commands="predict report",
    )
    follow_links: bool = field(
        False,
        "Follow links that lead out of the data folder.",
        commands="predict report",
    )
    imagenet_split: Literal["A", "B", "C"] = field(
        "A",
        "Which 30 held-out ImageNet classes are novel (imagenet:DIR without"
        " --known-classes).",
    )
    limit: int | None = field(
        None,
        "Use at most this many rows of each split, spread evenly over the classes.",
        flag="limit",
        commands="predict",
        ge=1,
    )
    download: bool = field(
        False, "Let cifar10:DIR and cifar100:DIR download.", commands="predict report"
    )
    stored_size: int = field(
        32, "Side of the stored square images, in pixels.", ge=4, le=1024
    )
    mean: tuple[float, float, float] = field(
        (0.4914, 0.4822, 0.4465), "Channel means subtracted after scaling to 0-1."
    )
    std: tuple[float, float, float] = field(
        (0.2470, 0.2435, 0.2616), "Channel standard deviations, divided by after that."
    )
    validation_fraction: float = field(
        0.0,
        "Fraction of labeled images, by class, held out for validation if the data has"
        " no test split with known classes; your own images: 0.1.",
        ge=0,
        lt=1,
    )
    interpolation: Literal["bilinear", "bicubic"] = field(
        "bilinear", "How images are resized, with antialiasing."
    )
    value_range: Range | None = field(
        None,
        "Stored values that become black and white in gray images of more than 8 bits;"
        " default: percentiles of a sample.",
    )
    batch_sampling: Literal["proportional", "balanced"] = field(
        "proportional",
        "Labeled to unlabeled images in a batch: as in the data, or 1:1 (the smaller"
        " set cycles).",
        scope="discover",
    )
    loading: Literal["auto", "memory", "streaming"] = field(
        "auto",
        "memory: decode once, keep uint8 images in memory; streaming: decode in every"
        " epoch; auto: memory where the set fits.",
    )
    max_bad_fraction: Probability = field(
        0.01, "Stop when more than this share of images is unreadable."
    )

    @model_validator(mode="after")
    def _check(self) -> DataConfig:
        """Check the section ``data``, after pydantic has checked each field by itself.

        Returns:
            The section itself, as pydantic requires.

        Raises:
            ValueError: ``labeled`` or ``unlabeled`` is given without the other, a
                standard deviation is not positive, the lower end of ``value_range`` is
                not below the upper one, ``columns`` has an unknown or repeated name
                (``path`` and ``image`` are the same one) or an entry without the user's
                name, or ``image_suffix`` does not begin with a dot.
        """
        if (self.labeled is None) != (self.unlabeled is None):
            raise ValueError("labeled and unlabeled must be given together")
        if min(self.std) <= 0:
            raise ValueError("std must be positive")
        if self.value_range and not self.value_range[0] < self.value_range[1]:
            low, high = self.value_range
            raise ValueError(f"value_range must satisfy low < high, got {low} {high}")
        for name, theirs in self._column_pairs:
            if name not in ("path", *COLUMNS) or not theirs:
                names = ", ".join(("path", *COLUMNS))
                raise ValueError(
                    f"columns must be as path=file,label=kind, of {names}, not {name!r}"
                )
        if len(self.named_columns) < len(self._column_pairs):
            raise ValueError(
                "columns must name each column once; path and image are the same one"
            )
        if self.image_suffix is not None and not self.image_suffix.startswith("."):
            raise ValueError("image_suffix must begin with a dot, such as .jpg")
        return self

    @property
    def named_columns(self) -> dict[str, str]:
        """A mapping from this program's names of a table's columns to the user's names.

        It is read from the field ``columns``, where ``path`` means ``image``. For
        example ``path=file,label=kind`` gives ``{"image": "file", "label": "kind"}``.
        Columns that are not renamed are left out, so the mapping is empty if
        ``columns`` is None.
        """
        return {
            "image" if ours == "path" else ours: theirs
            for ours, theirs in self._column_pairs
        }

    @property
    def _column_pairs(self) -> list[tuple[str, str]]:
        """The pairs (this program's name, user's name) of a table's renamed columns.

        They are in the order of the field ``columns``: ``path=file,label=kind`` gives
        ``[("path", "file"), ("label", "kind")]``. They are not checked: an entry
        without ``=`` has '' as the user's name. Surrounding spaces are removed, and
        empty entries are left out. The list is empty if ``columns`` is None.
        """
        pairs = (
            pair.partition("=")
            for pair in (self.columns or "").split(",")
            if pair.strip()
        )
        return [(ours.strip(), theirs.strip()) for ours, _, theirs in pairs]


class ViewConfig(Section):
    """How one kind of view is cut from an image and changed.

    An operation with probability 0 is off.
    """

    num_views: int = field(2, "Views of this kind per image.", ge=0, le=8)
    size: int = field(32, "Side of the view in pixels.", ge=4, le=1024)
    crop: Literal["none", "pad", "resized", "pad_or_resized"] = field(
        "pad_or_resized",
        "Random crop after padding, random-resized crop, or one of the two at random.",
    )
    crop_padding: int = field(
        4, "Zero padding on each side before a random crop, pixels.", ge=0, le=256
    )
    crop_scale: Range = field(
        (0.8, 1.0),
        "Area of a random-resized crop, as a share of the image.",
        search=dict(
            choices=((0.3, 1.0), (0.5, 1.0), (0.8, 1.0)),
            reason=(
                "paper 0.8, authors' later 0.5; where the preset takes no resized crops"
                " it is left out"
            ),
        ),
    )
    flip: Probability = field(0.5, "Probability of a horizontal flip.")
    affine: Probability = field(0.0, "Probability of a random affine map.")
    affine_degrees: float = field(
        0.0, "Rotation is uniform in +- this many degrees.", ge=0, le=180
    )
    affine_translate: Probability = field(
        0.0, "Shift is uniform in +- this share of the side, per axis."
    )
    affine_scale: Range = field((1.0, 1.0), "Range of the isotropic zoom.")
    affine_shear: float = field(
        0.0, "Shear along x is uniform in +- this many degrees.", ge=0, le=60
    )
    jitter: Probability = field(
        0.5,
        "Probability of color jitter.",
        search=dict(
            choices=(0.0, 0.25, 0.5, 0.8, 1.0),
            reason=(
                "strength of the color augmentation: the share of views it touches"
                " (paper 0.5)"
            ),
        ),
    )
    brightness: float = field(
        0.3, "Brightness factor is uniform in 1 +- this.", ge=0, le=1
    )
    contrast: float = field(0.3, "Contrast factor is uniform in 1 +- this.", ge=0, le=1)
    saturation: float = field(
        0.15, "Saturation factor is uniform in 1 +- this.", ge=0, le=1
    )
    hue: float = field(
        0.1, "Hue shift is uniform in +- this share of the color circle.", ge=0, le=0.5
    )
    grayscale: Probability = field(0.1, "Probability of conversion to gray.")
    solarize: Probability = field(
        0.0, "Probability of solarize with a uniform random threshold."
    )
    equalize: Probability = field(0.0, "Probability of histogram equalization.")
    blur: Probability = field(0.0, "Probability of Gaussian blur.")
    blur_sigma: Range = field(
        (0.1, 2.0), "Range of the blur's standard deviation, pixels."
    )

    @model_validator(mode="after")
    def _check(self) -> ViewConfig:
        """Check the ranges of a view: crop area, zoom and standard deviation of blur.

        Returns:
            The section itself, as pydantic requires.

        Raises:
            ValueError: The lower end of a range is not positive or exceeds the upper
                end, or the upper end of ``crop_scale`` exceeds 1.
        """
        for name in ("crop_scale", "affine_scale", "blur_sigma"):
            low, high = getattr(self, name)
            if not 0 < low <= high:
                raise ValueError(
                    f"{name} must satisfy 0 < low <= high, got {low} {high}"
                )
        if self.crop_scale[1] > 1:
            raise ValueError("crop_scale must not exceed 1")
        return self


class AugmentConfig(Section):
    """The views of an image.

    Large views give pseudo-labels. Small ones are only predicted (multi-crop).
    """

    large: ViewConfig = ViewConfig()
    small: ViewConfig = ViewConfig(
        num_views=0, size=18, crop="resized", crop_scale=(0.3, 0.8)
    )
    weak: bool = field(
        False, "Crop and flip only (the paper's weak augmentation, Tab. 2)."
    )
    vector_noise: float = field(
        0.1,
        "--data vectors with fewer views a row than a step takes: each view has normal"
        " noise of so many standard deviations of each number.",
        ge=0,
        lt=10,
        search=False,
    )
    num_cached_views: int = field(
        6,
        "Frozen encoder: random views per image whose features are cached; a step uses"
        " some. 0: the evaluation view alone, where nothing is trained.",
        ge=0,
        le=64,
        search=False,
    )

    @model_validator(mode="after")
    def _check(self) -> AugmentConfig:
        """Check the numbers of views of an image.

        Returns:
            The section itself, as pydantic requires.

        Raises:
            ValueError: There are fewer than two large views, which give the
                pseudo-labels; or there are cached views (random views of which the
                features of a frozen encoder are computed once), but fewer than large
                views. 0 cached views are allowed.
        """
        if self.large.num_views < 2:
            raise ValueError(
                "large.num_views must be at least 2: swapped prediction needs two views"
            )
        if 0 < self.num_cached_views < self.large.num_views:
            raise ValueError("num_cached_views must be 0 or at least large.num_views")
        return self


class ModelConfig(Section):
    """Encoder and heads (paper Sec. 3.1, 3.3, 4.1)."""

    encoder: str = field(
        "resnet18",
        "resnet_small (He et al. 2016, Sec. 4.2), resnet18, resnet34, resnet50,"
        " torchvision:NAME, timm:NAME, timm:hf-hub:ORG/NAME or package.module:callable,"
        " which returns a module (B, 3, S, S) -> (B, D); vectors:D for --data"
        " vectors:PATH, which needs none.",
    )
    stem: Literal["cifar", "cifar_stride2", "imagenet"] = field(
        "cifar",
        "3x3 convolution of stride 1 (small images), 4x4 of stride 2, or resnetN:"
        " torchvision's 7x7 stem.",
    )
    width: int = field(16, "resnet_small: channels of the first stage.", ge=4, le=512)
    blocks: int = field(1, "resnet_small: residual blocks per stage.", ge=1, le=18)
    stages: int = field(
        3, "resnet_small: stages, each of twice the channels.", ge=2, le=5
    )
    num_heads: int = field(
        4,
        "Cluster heads and overclustering heads, each (n).",
        ge=1,
        le=32,
        scope="discover",
        search=dict(
            low=2,
            high=8,
            scale="int",
            reason=(
                "paper 4; restarts of the clustering, of which the best is taken; cost"
                " grows with them"
            ),
        ),
    )
    overcluster_factor: int = field(
        3,
        "Clusters of an overclustering head over novel classes (m); 0: no such heads.",
        ge=0,
        le=50,
        scope="discover",
        search=dict(
            choices=(0, 1, 2, 3, 5, 8),
            reason="paper 3, authors' later 3-10; 0 switches overclustering off",
        ),
    )
    hidden_dim: int = field(
        2048, "Hidden units of a projection head.", ge=1, le=65536, scope="discover"
    )
    projection_dim: int = field(
        256, "Outputs of a projection head.", ge=1, le=16384, scope="discover"
    )
    weights: str | None = field(
        None,
        "Discover from this run directory, an encoder's .safetensors, .pt or .pth, or"
        " the library's own weights (pretrained): no pretraining here.",
        flag="weights",
        scope="discover",
        search=False,
        fixed_by="reproduce",
    )
    finetune: Literal["full", "last_stage", "none"] = field(
        "full",
        "What is trained: encoder and heads, the encoder's last stage and the heads, or"
        " heads alone.",
    )
    prototype_init: Literal["random", "kmeans"] = field(
        "random",
        "Random prototypes (paper), or the k-means centers of the encoder's features.",
        scope="discover",
        search=False,
    )
    encoder_lr_factor: float = field(
        1, "The encoder's learning rate, as a multiple of the heads'.", gt=0, le=100
    )
    mlp_input: Literal["normalized", "raw"] = field(
        "normalized",
        "Projection heads read the l2-normalized feature (paper) or the raw one (v2).",
        scope="discover",
    )

    @field_validator("encoder")
    @classmethod
    def _check_encoder(cls, name: str) -> str:
        """Check the form of the encoder's name, and return it unchanged.

        Nothing is imported, so the encoder need not exist.

        Raises:
            ValueError: The name is none of this package's encoders, and is not of the
                form ``torchvision:NAME``, ``timm:NAME``, ``timm:hf-hub:ORG/NAME`` (with
                or without ``@REVISION``), ``package.module:NAME``, ``vectors`` or
                ``vectors:D`` with at most six digits.
        """
        if name not in OWN_ENCODERS and not re.fullmatch(
            rf"{LIBRARY_ENCODER}|{VECTORS}(:\d{{1,6}})?", name
        ):
            own = ", ".join(OWN_ENCODERS)
            raise ValueError(
                f"must be {own}, torchvision:NAME, timm:NAME, timm:hf-hub:ORG/NAME or"
                " package.module:callable"
            )
        return name

    @property
    def takes_vectors(self) -> bool:
        """Whether ``encoder`` is "vectors" or begins with "vectors:", as "vectors:D".

        The data then consists of vectors instead of images, and no encoder is needed.
        """
        return self.encoder.partition(":")[0] == VECTORS


class ObjectiveConfig(Section):
    """The unified objective and its pseudo-labels (paper Sec. 3.1, 3.2)."""

    temperature: float = field(
        0.1,
        "Softmax temperature tau.",
        gt=0,
        le=100,
        scope="pretrain",
        search=dict(
            choices=(0.05, 0.07, 0.1, 0.14, 0.2),
            reason=(
                "paper 0.1; steps of 1.4, not a range: pretraining depends on it and is"
                " trained once a value"
            ),
        ),
    )
    epsilon: float = field(
        0.05,
        "Entropy weight of Sinkhorn-Knopp.",
        ge=1e-4,
        le=10,
        search=dict(
            low=0.01,
            high=0.25,
            scale="log",
            reason=(
                "paper 0.05; below 0.01 targets are one-hot and change clusters, above"
                " 0.25 near uniform"
            ),
        ),
    )
    sinkhorn_iters: int = field(
        3,
        "Sinkhorn-Knopp iterations.",
        ge=1,
        le=1000,
        search=dict(
            low=1,
            high=10,
            scale="int",
            reason="paper 3; beyond 10 Sinkhorn has converged",
        ),
    )
    aggregation: Literal["swap", "average_pseudo_labels", "average_logits"] = field(
        "swap", "How the views' pseudo-labels are combined (paper, appendix)."
    )
    class_prior: Literal["uniform", "kmeans"] | None = field(
        None,
        "Class prior of Sinkhorn-Knopp: uniform, or k-means cluster sizes, weighted by"
        " how well k-means recovers the sizes of the known classes; default: kmeans for"
        " gcd, else uniform.",
    )
    concat: bool = field(
        True, "One softmax over known and novel outputs; off: two separate losses."
    )
    pseudo_labels: Literal["soft", "hard"] = field(
        "soft", "Soft pseudo-labels, or their argmax."
    )
    iic_weight: float = field(
        0, "IIC: pushes labeled and unlabeled outputs apart (0.05).", ge=0, le=100
    )
    iic_view_weight: float = field(
        0, "IIC: pulls an image's views together (0.01).", ge=0, le=100
    )
    rkd_weight: float = field(
        0,
        "rKD: distils the pretrained known head's outputs on unlabeled rows (0.1).",
        ge=0,
        le=100,
    )
    rkd_temperature: float = field(
        4, "Temperature of rKD's softmax, besides tau.", gt=0, le=100
    )
    queue_size: int = field(
        0,
        "Past unlabeled rows that Sinkhorn sees too, after warm-up.",
        ge=0,
        le=MAX_QUEUE_ROWS,
    )


class PhaseConfig(Section):
    """One training phase: SGD with momentum, linear warm-up, cosine decay."""

    epochs: int = field(200, "Length of the phase in epochs.", ge=0, le=100_000)
    base_lr: float = field(
        0.1,
        "Learning rate after warm-up, for a loss that is the mean of the head families;"
        " the authors' first code sums them, which is twice the gradient.",
        gt=0,
        le=100,
        search=dict(
            low=0.02,
            high=0.5,
            scale="log",
            reason="paper 0.1, authors' later 0.4; beyond 0.5 it diverges",
        ),
    )
    min_lr: float = field(
        0.001, "Learning rate at the first and last step.", ge=0, le=100
    )
    warmup_epochs: float = field(
        10, "Length of the linear warm-up in epochs.", ge=0, le=100_000
    )
    momentum: float = field(0.9, "SGD momentum.", ge=0, lt=1)
    weight_decay: float = field(
        1e-4,
        "SGD weight decay, all parameters.",
        ge=0,
        le=1,
        search=dict(
            low=1e-5, high=1e-3, scale="log", reason="paper 1e-4, authors' later 1.5e-4"
        ),
    )


class PretextConfig(PhaseConfig):
    """Self-supervised training of the encoder, before supervised pretraining.

    It uses all rows, labeled and unlabeled.
    """

    epochs: int = field(
        0, "Length of the phase in epochs; 0: there is none.", ge=0, le=100_000
    )
    weight_decay: float = field(5e-4, "SGD weight decay, all parameters.", ge=0, le=1)
    task: str = field(
        "rotation",
        f"Pretext task: {', '.join(PRETEXTS)}, or package.module:PRETEXT of your own.",
    )


class TrainConfig(Section):
    """Settings that all training phases share."""

    batch_size: int = field(
        512,
        "Global batch size in images, over all workers.",
        ge=2,
        le=1_000_000,
        flag="batch-size",
    )
    max_steps: int | None = field(
        None,
        "Stop each phase after this many steps (schedules keep their full length).",
        ge=1,
        flag="max-steps",
        search=False,
    )
    log_every: int = field(50, "Steps between two lines of metrics.", ge=1, scope="run")
    checkpoint_every_epochs: int = field(
        10, "Epochs between two checkpoints.", ge=1, scope="run"
    )
    checkpoint_every_minutes: float | None = field(
        10,
        "Minutes after which a line of metrics comes with a checkpoint.",
        gt=0,
        le=100_000,
        scope="run",
    )
    keep_checkpoints: int = field(2, "Checkpoints kept per phase.", ge=1, scope="run")
    eval_batch_size: int = field(
        1024,
        "Rows per evaluation batch on each worker.",
        ge=1,
        scope="run",
        commands="evaluate",
    )
    report_to: str = field(
        "tensorboard",
        f"Who gets the lines of metrics, with commas: {', '.join(REPORTERS)}"
        " (metrics.jsonl, which training always writes).",
        flag="report-to",
        scope="run",
    )

    @model_validator(mode="after")
    def _check(self) -> TrainConfig:
        """Check the names of loggers in ``report_to``.

        Returns:
            The section itself, as pydantic requires.

        Raises:
            ValueError: A name is unknown.
        """
        if unknown := [name for name in self.loggers if name not in REPORTERS]:
            raise ValueError(
                f"report_to takes {', '.join(REPORTERS)}, not {unknown[0]!r}"
            )
        return self

    @property
    def loggers(self) -> tuple[str, ...]:
        """The names of the loggers in the field ``report_to``, each once.

        The field has names with commas between them: ``tensorboard,wandb`` gives
        ``("tensorboard", "wandb")``. The order is that of the field. Spaces around
        names and empty names are left out, so an empty field gives ``()``.
        """
        return tuple(
            dict.fromkeys(
                name.strip() for name in self.report_to.split(",") if name.strip()
            )
        )


class ComputeConfig(Section):
    """Where the run executes. These settings may change when a run resumes."""

    num_workers: int = field(
        0,
        "Ray workers; 0 works in this process without Ray.",
        ge=0,
        le=4096,
        flag="workers",
        commands="evaluate predict",
    )
    device: Literal["auto", "cpu", "cuda"] = field(
        "auto",
        "auto takes CUDA where there is one.",
        flag="device",
        commands="evaluate predict report",
    )
    gpus_per_worker: float = field(
        1.0,
        "GPUs reserved for each Ray worker when the device is cuda.",
        ge=0,
        le=16,
        flag="gpus-per-worker",
        commands="evaluate predict",
    )
    cpus_per_worker: float | None = field(
        None,
        "CPUs reserved for each Ray worker; default min(1, (CPUs - 1) / workers), or"
        " for training on GPUs from a stream an equal share of a node.",
        gt=0,
        commands="evaluate predict",
    )
    placement_strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = (
        field("PACK", "Ray's strategy: workers on few nodes, or spread over many.")
    )
    wait_minutes: float = field(
        30,
        "How long a command waits at its start for nodes of a cluster that cannot place"
        " its workers yet.",
        ge=0,
        le=10_000,
        commands="evaluate predict",
    )
    precision: Literal["auto", "fp32", "bf16"] = field(
        "auto", "Encoder and MLP arithmetic; auto is bf16 on CUDA and fp32 on the CPU."
    )
    compile: bool = field(
        False, "torch.compile the encoder; needs a C++ compiler, and a minute."
    )
    cuda_graph: bool = field(
        False,
        "Record UNO's training steps once and replay them as a CUDA graph: less work"
        " for the host; one worker.",
    )
    encoder_runtime: Literal["torch", "openvino"] = field(
        "torch",
        "What computes frozen features and predictions on CPUs.",
        commands="predict",
    )
    threads: int | None = field(
        None,
        "CPU threads per worker; default: all cores / workers.",
        ge=1,
        le=MAX_THREADS,
        commands="evaluate predict report",
    )
    cache: str | None = field(
        None,
        "Directory that keeps features of frozen encoders for all runs; default"
        " $UNO_CACHE or ~/.cache/uno.",
    )

    @field_validator("gpus_per_worker")
    @classmethod
    def _check_whole_gpus(cls, value: float) -> float:
        """Check that a number of GPUs is at most 1 or a whole number, and return it.

        Ray cannot reserve 1.5 GPUs on any node.

        Raises:
            ValueError: The number is above 1 and has a fraction.
        """
        if value > 1 and value % 1:
            raise ValueError("must be a fraction of one GPU, or a whole number")
        return value


class Config(Section):
    """All settings of a run of pretraining and discovery.

    If the method has constants of its own, its section is one more key. For ``method:
    ncl`` it is ``ncl``, a :class:`uno.methods.ncl.Constants`.
    """

    # Only the method's section is allowed in addition, see _with_method_section.
    model_config = ConfigDict(extra="allow")

    preset: str = field(
        "scratch",
        "Named settings; default: digits, or for other data photos or scratch.",
        search=False,
        fixed_by="reproduce",
    )
    recipe: Literal["paper", "v2", "cpu"] = field(
        "paper",
        "The paper's settings, the authors' improved ones, or (cifar10) a one-hour"
        " recipe for one CPU core.",
        search=False,
    )
    method: str = field(
        DEFAULT,
        f"Discovery method: {', '.join(METHODS)}, or package.module:METHOD of your"
        " own.",
        scope="discover",
    )
    seed: int = field(
        0,
        "Seed of every random number of the run.",
        ge=0,
        lt=2**31,
        search=False,
        fixed_by="reproduce",
    )
    output: str | None = field(
        None,
        "Run directory, a path or a URI; default runs/PRESET-seedSEED.",
        scope="place",
        commands="predict",
        fixed_by="reproduce",
    )
    data: DataConfig = field(DataConfig(), search=False)
    augment: AugmentConfig = AugmentConfig()
    model: ModelConfig = ModelConfig()
    objective: ObjectiveConfig = field(ObjectiveConfig(), scope="discover")
    pretext: PretextConfig = PretextConfig()
    pretrain: PhaseConfig = PhaseConfig()
    discover: PhaseConfig = field(PhaseConfig(), scope="discover")
    train: TrainConfig = TrainConfig()
    compute: ComputeConfig = field(
        ComputeConfig(), scope="place", commands="evaluate report"
    )

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the configuration as plain values.

        A process that unpickles them validates them again. So it imports the discovery
        method, unless that is UNO, before it builds the method's section of the
        configuration.

        Returns:
            The function ``Config.model_validate``, and its one argument in a tuple: the
            configuration as nested dicts.
        """
        return Config.model_validate, (to_dict(self),)

    @property
    def method_options(self) -> Any:
        """The section of the discovery method; None if it has no constants of its own.

        It is an instance of the class in the method's attribute ``constants``. UNO has
        no section of its own: its constants are the section ``objective``.
        """
        return next(iter((self.model_extra or {}).values()), None)

    @model_validator(mode="before")
    @classmethod
    def _with_method_section(cls, values: Any) -> Any:
        """Validate the section of the discovery method, before all other fields.

        The module of a method other than "uno" is imported for this.

        Args:
            values: The mapping of keys to values, from which a configuration is made.

        Returns:
            A copy of the mapping, with the section as an instance of its class. If the
            mapping lacks the section, the section has its defaults. A method without
            constants of its own has no section. Anything but a dict is returned as it
            is.

        Raises:
            ValueError: There is no such method, a top-level key is unknown, a value of
                the section is refused, or the section has the name of a field of
                :class:`Config`.
        """
        if not isinstance(values, dict):
            return values
        sections = section(str(values.get("method", DEFAULT)))
        if taken := sections.keys() & cls.model_fields.keys():
            raise ValueError(
                f"the section of the method cannot be named {taken.pop()!r}: there"
                " is one"
            )
        if others := values.keys() - cls.model_fields.keys() - sections.keys():
            raise ValueError(f"unknown key {min(map(str, others))[:100]!r}")
        try:
            validated = {
                name: model.model_validate(values.get(name, {}))
                for name, model in sections.items()
            }
        except ValidationError as error:
            raise ValueError(describe(error, *sections)) from None
        return values | validated

    @model_validator(mode="after")
    def _check(self) -> Config:
        """Check the sections against each other and against the discovery method.

        The discovery method is imported if one of the checks needs it, and the pretext
        task if it has epochs.

        Returns:
            The configuration itself, as pydantic requires.

        Raises:
            ValueError: The pretext task has epochs and cannot be loaded. Or settings do
                not go together, and the message names them: k-means prototypes or an
                added term of the objective (IIC, rKD or the queue, see
                :data:`EXTENSIONS`) with a method without UNO's projection heads;
                vectors with a ``model.finetune`` other than "none"; ``model.finetune
                none`` with small views, with epochs of the pretext task, or with epochs
                of discovery and no cached views; or ``data.setting gcd`` where
                :func:`why_not_gcd` gives a reason.
        """
        if self.pretext.epochs:
            load_pretext(self.pretext.task)
        if (
            self.model.prototype_init == "kmeans"
            and not load(self.method).has_projection_heads
        ):
            raise ValueError(
                "model.prototype_init kmeans needs UNO's heads: not with method"
                f" {self.method}"
            )
        if self.model.takes_vectors and self.model.finetune != "none":
            raise ValueError(
                "model.encoder vectors needs model.finetune none: no encoder is there"
            )
        if self.model.finetune == "none":
            if self.augment.small.num_views:
                raise ValueError(
                    "augment.small.num_views must be 0 with model.finetune none"
                )
            if self.pretext.epochs:
                raise ValueError("pretext.epochs must be 0 with model.finetune none")
            if self.discover.epochs and not self.augment.num_cached_views:
                raise ValueError(
                    "augment.num_cached_views must be at least 2 where discover.epochs"
                    " is not 0"
                )
        if self.data.setting == "gcd" and (reason := why_not_gcd(self)):
            raise ValueError(reason)
        for name in EXTENSIONS:
            if (
                getattr(self.objective, name)
                and not load(self.method).has_projection_heads
            ):
                raise ValueError(
                    f"objective.{name} does not go with method {self.method}"
                )
        return self


EXTENSIONS = ("iic_weight", "iic_view_weight", "rkd_weight", "queue_size")
"""Settings that switch on added terms of the objective, if they are not 0.

Only methods with UNO's projection heads have these terms.
"""


def why_not_gcd(config: Config) -> str | None:
    """Return why a run cannot use generalized category discovery (GCD), None if it can.

    In the GCD setting unlabeled images may belong to known classes, too. The value of
    ``data.setting`` itself does not matter here.

    Args:
        config: The configuration of the run.

    Returns:
        The first error message that applies: the method does not support GCD,
        ``objective.concat`` is off, or an added term of the objective that takes
        unlabeled rows for novel ones (IIC, the queue) is on. None if nothing is in the
        way.

    Raises:
        ConfigError: The method cannot be loaded.
    """
    if not load(config.method).supports_gcd:
        return f"data.setting gcd does not go with method {config.method}"
    if not config.objective.concat:
        return (
            "data.setting gcd needs objective.concat: known and novel outputs compete"
        )
    for name in ("iic_weight", "iic_view_weight", "queue_size"):
        if getattr(config.objective, name):
            return (
                f"objective.{name} takes unlabeled rows for novel ones: not with"
                " data.setting gcd"
            )
    return None


def clusters_features(config: Config) -> bool:
    """Return whether the method of a run clusters features instead of training heads.

    That is so if the method's attribute ``trains`` is False. Such a method needs more
    unlabeled rows than clusters.

    Raises:
        ConfigError: The method cannot be loaded.
    """
    return not load(config.method).trains


def field_traits(key: str) -> FieldTraits:
    """Return the traits that the schema declares for a field or a section.

    They say, for example, which phase the field changes and its short form on the
    command line, see :class:`FieldTraits`. A field has the traits of its section,
    except for those that it declares itself.

    Args:
        key: The dotted key, such as ``objective.epsilon``. The first part may be the
            section of a method. A method of this package is then imported, and one of
            the user's must have been loaded before. The fields of such a section have
            the scope "discover" unless they declare another. A key that is unknown
            within a section has the traits of the section, and one in an unknown
            section has the defaults of :class:`FieldTraits`.
    """
    first, *rest = key.split(".")
    if first in Config.model_fields:
        traits, model, names = (
            FieldTraits(),
            Config,
            [first, *rest],
        )  # type: tuple[FieldTraits, Any, list[str]]
    else:  # the section of a method, or an unknown key
        model, names = section_model(first), rest
        traits = FieldTraits() if model is None else FieldTraits(scope="discover")
    for name in names:
        info = getattr(model, "model_fields", {}).get(name)
        if info is None:
            break
        traits = traits._replace(**(info.json_schema_extra or {}))
        model = info.annotation
    return traits


def require_code(tree: Mapping[str, Any], foreign: str | None) -> None:
    """Import the discovery method that a stored configuration names, if it is code.

    The name ``package.module:METHOD`` means code outside this package. This must be
    called before the stored values become a :class:`Config`, which needs the method.
    Nothing happens if neither the method nor the pretext task is such code. The pretext
    task is not imported here.

    Args:
        tree: The stored configuration. Its method may be ``package.module:METHOD``.
        foreign: The directory of the configuration if its origin is not known. Code for
            the method or the pretext task must not lie there, so that a downloaded
            model does not run code of its own. Code that lies elsewhere is named in a
            logged warning. None if the origin is known; nothing is checked then.

    Raises:
        ConfigError: The method cannot be imported, the imported object is no method or
            its ``name`` is taken or no identifier, or code of the method or of the
            pretext task lies in ``foreign``.
    """
    flat = flatten(tree)
    for key in ("method", "pretext.task"):
        if is_object_name(name := str(flat.get(key))) and foreign is not None:
            check_origin(key, name, foreign)
    if is_object_name(name := str(flat.get("method"))):
        load(name)


def may_change_on_resume(key: str) -> bool:
    """Return whether the value of a setting may change when a run resumes.

    Such a setting decides how a run is logged, checkpointed or evaluated, or where and
    in which precision it is computed. It is no part of what is to be learned.

    Args:
        key: The dotted key of the setting, such as ``train.log_every``.
    """
    return field_traits(key).scope in ("run", "place")


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Turn nested mappings into one mapping with dotted keys.

    For example ``{"objective": {"epsilon": 0.05}}`` becomes ``{"objective.epsilon":
    0.05}``.

    Args:
        tree: Nested mappings. A key may be dotted already, and is turned into text if
            it is none. An empty mapping adds no key. Of equal dotted keys the last
            value counts.
        prefix: A text to put before each key of the result.
    """
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= (
            flatten(value, f"{prefix}{key}.")
            if isinstance(value, Mapping)
            else {f"{prefix}{key}": value}
        )
    return flat


def to_dict(config: Config) -> dict[str, Any]:
    """Return a configuration as nested dicts of values that YAML and JSON can hold.

    All settings are in it, also the section of the method. Tuples become lists.
    """
    return config.model_dump(mode="json")


def fields_of(*methods: str) -> dict[str, FieldInfo]:
    """Return the top-level fields of the configuration, by name.

    Args:
        *methods: Discovery methods, each a key of :data:`uno.method.METHODS` or
            ``package.module:METHOD``. They are imported, except for UNO, and their
            sections are added.

    Returns:
        pydantic's description (``FieldInfo``) of each field, such as ``seed``, and of
        each section, such as ``data``. That of a method's section has only the class of
        the section, as ``annotation``.

    Raises:
        ConfigError: A method cannot be loaded, see :func:`uno.method.load`.
    """
    sections = [item for method in methods for item in section(method).items()]
    return Config.model_fields | {
        name: FieldInfo(annotation=model) for name, model in sections
    }


@cache
def field_names(method: str = DEFAULT) -> tuple[str, ...]:
    """Return the dotted names of all fields of a configuration, in schema order.

    The result is kept, so a later call with the same method returns the same tuple.

    Args:
        method: The discovery method, a key of :data:`uno.method.METHODS` or
            ``package.module:METHOD``. It is imported, unless it is UNO, and the fields
            of its section are included at the end.

    Raises:
        ConfigError: The method cannot be loaded, see :func:`uno.method.load`.
    """
    section(method)  # its error is one line, that of ``Config`` has several
    return tuple(flatten(to_dict(Config(method=method))))


def override(config: Config, overrides: Mapping[str, Any]) -> Config:
    """Return a configuration with some values replaced.

    If the method changes, the section of the former method is dropped, and that of the
    new one has its defaults.

    Args:
        config: The configuration, which stays as it is.
        overrides: New values by dotted key, such as ``{"objective.epsilon": 0.1}``, or
            nested. None for a whole section changes nothing.

    Returns:
        The new configuration. All of its values are validated again.

    Raises:
        ConfigError: A key is unknown, a section is given a single value other than
            None, the method cannot be loaded, a value is refused, or two values do not
            go together.
    """
    tree, flat = to_dict(config), flatten(overrides)
    method = str(flat.get("method", config.method))
    if method != config.method:
        tree = {name: tree[name] for name in Config.model_fields} | {
            name: {} for name in section(method)
        }
    known = field_names(method)
    for key, value in flat.items():
        if key not in known:
            fields = [name for name in known if name.startswith(f"{key}.")]
            if fields and value is None:  # all lines of the section are comments
                continue
            if fields:
                got = f"(got {repr(value)[:100]})"
                raise ConfigError(
                    f"{key!r} is a section of keys such as {fields[0]!r} {got}"
                )
            raise ConfigError(_unknown_key(key, method))
        *parents, leaf = key.split(".")
        node = tree
        for parent in parents:
            node = node[parent]
        node[leaf] = value
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(describe(error)) from None


def _unknown_key(key: str, method: str) -> str:
    """Return the error message for a key of the configuration that does not exist.

    The message names the method that the key belongs to, or a similar key, if any.

    Args:
        key: The dotted key that the user wrote.
        method: The discovery method of the run.
    """
    if (owner := key.partition(".")[0]) in METHODS and key in field_names(owner):
        return f"{key} belongs to method {owner}, not to {method}"
    return f"unknown key {key[:100]!r}{did_you_mean(key, field_names(method))}"


def describe(error: ValidationError, name: str = "") -> str:
    """Return the first problem that pydantic found, as one line for the user.

    Args:
        error: The error that pydantic raised.
        name: The key of the section that was validated, which is put before the keys in
            the error; "" if a whole configuration was validated.

    Returns:
        The dotted key, the problem and the value, such as ``objective.epsilon: Input
        should be greater than or equal to 0.0001 (got -1)``. A long value is shortened.
        The value is left out if it is a section. If the problem belongs to no key and
        ``name`` is "", the result is the problem alone.
    """
    first = error.errors()[0]
    loc = [
        str(part)
        for part in first["loc"]
        if str(part).isidentifier() or isinstance(part, int)
    ]
    where = ".".join([name, *loc] if name else loc)
    message = first["msg"].removeprefix("Value error, ")
    got = (
        ""
        if isinstance(first["input"], Mapping | BaseModel)
        else f" (got {reprlib.repr(first['input'])})"
    )
    return f"{where}: {message}{got}" if where else message


AUTO_KEYS = ("data.loading", "data.setting")
"""Keys whose value ``auto`` is replaced by a decision before a run begins."""


def differing_keys(old: Mapping[str, Any], new: Config) -> list[str]:
    """Return the settings that keep a run from resuming with another configuration.

    They are the dotted keys whose values differ, except for settings that may change
    when a run resumes (:func:`may_change_on_resume`). For ``data.loading`` and
    ``data.setting`` the value "auto", in either configuration, equals every value.

    Args:
        old: The stored configuration of the run, nested or with dotted keys. A key that
            it lacks has the default of the schema.
        new: The configuration to resume with.

    Returns:
        The keys in alphabetical order, also those that only ``old`` has; empty if the
        run can resume.
    """
    stored = flatten(to_dict(Config(method=new.method))) | flatten(old)
    wanted = flatten(to_dict(new))
    for key in AUTO_KEYS:  # A run stores the decided value.
        if "auto" in (stored.get(key), wanted[key]):
            stored[key] = wanted[key]
    return [
        key
        for key in sorted(stored.keys() | wanted.keys())
        if stored.get(key) != wanted.get(key) and not may_change_on_resume(key)
    ]


def config_hash(config: Config) -> str:
    """Return a hash of the settings that can change what is learned, 12 hex digits.

    The hash serves to find stored work that was made with the same settings, such as a
    pretraining that several runs share. Whether a run may resume is not decided by it,
    but by :func:`differing_keys`. All settings count, except for those that may change
    when a run resumes (:func:`may_change_on_resume`): logging, checkpoints, evaluation
    and the place of execution. The digits are the first ones of the SHA-256 of the
    settings as JSON with sorted keys.
    """
    settings = {
        key: value
        for key, value in flatten(to_dict(config)).items()
        if not may_change_on_resume(key)
    }
    text = json.dumps(settings, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


# ten times as fast, written in C
SAFE_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
SAFE_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
LONG_NUMBER = re.compile(r"[-+0-9_:.]{100,}")


def load_yaml(path: str | Path) -> dict[str, Any]:
    """Read settings from a YAML file.

    Args:
        path: A path or URI. The file holds nested mappings, dotted keys, or both.

    Returns:
        Values by dotted key, such as ``{"objective.epsilon": 0.05}``. Neither the keys
        nor the values are compared with the schema.

    Raises:
        ConfigError: The file cannot be read, or :func:`parse_yaml` refuses its content.
    """
    # Imported here, because a command line without a file needs no pyarrow.
    from uno.data.files import read_bytes

    try:
        data = read_bytes(str(path), MAX_CONFIG_BYTES)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        why = one_line(getattr(error, "strerror", None) or error)
        raise ConfigError(f"cannot read config file {path}: {why}") from None
    return flatten(parse_yaml(data, f"config file {path}"))


def parse_yaml(data: bytes, where: str) -> Mapping[str, Any]:
    """Parse the content of a YAML file of unknown origin.

    Content that would take unbounded time or memory is refused, such as any alias
    (``*name``). Aliases grow as 2^n, 20 kB of ``[`` take 35 s, and a number in base 60
    with 300,000 digits takes 50 s.

    Args:
        data: The bytes of the file, UTF-8.
        where: The name of the file, for the error message.

    Returns:
        The mapping that the file holds, as it is nested there; {} if the file is empty,
        has only comments or holds null.

    Raises:
        ConfigError: The content is not UTF-8 or not valid YAML, holds something else
            than a mapping, has an alias, or exceeds a limit: ``MAX_CONFIG_BYTES``
            (1,000,000), the depth ``MAX_CONFIG_DEPTH`` (20), about
            ``MAX_CONFIG_VALUES`` (100,000) events of the YAML parser, or 99 characters
            for a key or value that consists of digits and of ``-+_:.``.
    """
    if len(data) > MAX_CONFIG_BYTES:
        raise ConfigError(f"{where} is larger than {MAX_CONFIG_BYTES} bytes")
    try:
        text, depth = data.decode(), 0
        for number, event in enumerate(yaml.parse(text, Loader=SAFE_LOADER)):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(
                event, yaml.CollectionEndEvent
            )
            if isinstance(event, yaml.AliasEvent):
                raise ValueError(
                    "YAML aliases (*name) are not accepted; write the values out"
                )
            if depth > MAX_CONFIG_DEPTH:
                raise ValueError(f"nested deeper than {MAX_CONFIG_DEPTH} levels")
            if isinstance(event, yaml.ScalarEvent) and LONG_NUMBER.fullmatch(
                event.value
            ):
                raise ValueError(f"a number of {len(event.value)} digits")
            if number > MAX_CONFIG_VALUES:
                raise ValueError(f"more than {MAX_CONFIG_VALUES} values")
        tree = yaml.load(text, Loader=SAFE_LOADER)
    # Examples are text that is not UTF-8, month 13, an integer of 5000 digits, and
    # values that are not of the type that their tag says, such as "!!bool x".
    except (yaml.YAMLError, ValueError, LookupError, AttributeError) as error:
        raise ConfigError(f"{where}: {' '.join(str(error).split())}") from None
    if tree is None:  # The file has comments only.
        return {}
    if not isinstance(tree, Mapping):
        raise ConfigError(
            f"{where} must hold a mapping of keys, not a {type(tree).__name__}"
        )
    return tree


def dump_yaml(config: Config) -> str:
    """Return the configuration as YAML text, which :func:`parse_yaml` reads.

    All settings are in it, also those that have their default.
    """
    return yaml.dump(
        to_dict(config),
        Dumper=SAFE_DUMPER,
        sort_keys=False,
        default_flow_style=None,
        width=110,
    )
