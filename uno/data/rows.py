"""The rows of a data set: one id, image, label and split for each row.

Every source is read into :class:`Rows`, in the way that :class:`ReadOptions` says.
Images stay encoded, and are read when they are needed.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute
from torch import Tensor

from uno.config import DataConfig
from uno.data.columns import fill_labels, rename_classes
from uno.data.decode import BadImage, ImageFacts, inspect_image, map_images, ok_mask
from uno.data.files import normalize_path
from uno.data.images import Images, as_images, evenly_spaced, name_row
from uno.errors import ConfigError, one_line
from uno.limits import MAX_LABEL_LENGTH, MAX_ROWS
from uno.text import composed

PART_ROWS = 2**16  # rows that are hashed at once
SAMPLE_SIZE = 64  # images that are inspected before a run
SPLITS = {
    "train": "train",
    "test": "test",
    "val": "test",
    "valid": "test",
    "validation": "test",
}
"""What sources call a split -> "train" or "test"."""


def split_of(name: str) -> str:
    """Return the split of the rows of a shard by its name, "train" or "test".

    The first word in the name of the file that is a key of :data:`SPLITS` decides:
    train gives "train"; test, val, valid and validation give "test". Words are
    separated by ``-``, ``_`` or ``.``, in any case of letters. If no word is a key, the
    whole name of the folder directly above the file decides in the same way. The
    result is "train" if neither names a split.

    Args:
        name: The path of the shard below the source, such as train-0-of-4.parquet or
            test/0000.tar.
    """
    folder, _, file = f"/{name}".rpartition("/")
    words = [*re.split(r"[-_.]", file.lower()), folder.rpartition("/")[2].lower()]
    return next((SPLITS[word] for word in words if word in SPLITS), "train")


@dataclass(frozen=True)
class ReadOptions:
    """How a data source is read. A source ignores the options that it has no use for.

    Attributes:
        columns: Standard name of a column, such as "label" -> its name in the source. A
            column that is not listed has its standard name.
        image_folder: Folder or URI that image paths are relative to; None for the
            folder of the table.
        image_suffix: Ending that is added to image paths that lack it, such as '.jpg';
            '' for none.
        follow_links: Whether a link may lead out of the folder of the source.
        images_only: Whether the rows are only to be predicted. Labels, and columns of
            splits, are then not read, every image of a folder is a row, and a row of a
            table without an image path is an unreadable image.
        download: Whether CIFAR may be downloaded.
        imagenet_split: "A", "B" or "C", which names the 30 novel classes of the
            benchmark on ImageNet. The other classes that the benchmark holds out are
            then left out, and all classes that it does not hold out are declared known.
            None to keep all classes, of which none is declared known.
    """

    columns: Mapping[str, str] = field(default_factory=dict)
    image_folder: str | None = None
    image_suffix: str = ""
    follow_links: bool = False
    images_only: bool = False
    download: bool = False
    imagenet_split: str | None = None

    @classmethod
    def of(cls, config: DataConfig, images_only: bool = False) -> ReadOptions:
        """Return the options that a configuration asks for.

        The image folder is normalized by ``normalize_path``, and a missing image suffix
        becomes ''. ``imagenet_split`` is None if ``known_classes`` of the configuration
        is set. The text of its ``columns`` becomes a mapping, in which a column named
        "path" is "image". The other options are those of the configuration.

        Args:
            config: The section ``data`` of the configuration.
            images_only: Whether the rows are only to be predicted, so that labels and
                splits are not read.
        """
        folder = config.image_folder
        return cls(
            columns=config.named_columns,
            image_folder=None if folder is None else normalize_path(folder),
            image_suffix=config.image_suffix or "",
            follow_links=config.follow_links,
            images_only=images_only,
            download=config.download,
            imagenet_split=None if config.known_classes else config.imagenet_split,
        )


DEFAULT_OPTIONS = ReadOptions()


class ImageSample(NamedTuple):
    """What a sample of the images of a data set shows.

    Attributes:
        readable: The facts of each readable image of the sample, in no particular
            order: format and size, the largest value, a sample of the values of a gray
            image of more than 8 bits, and whether it has further pages. Empty for a
            source of vectors.
        reasons: Row number in the data set -> the reason why the image cannot be read,
            or why the row has no usable vector.
        num_rows: The number of rows of the sample, readable or not.
    """

    readable: list[ImageFacts]
    reasons: dict[int, str]
    num_rows: int


@dataclass(frozen=True, eq=False)
class Rows:
    """The N rows of a data set.

    Making an object raises ConfigError if two ids are equal, if there are more than
    ``MAX_ROWS`` (100 million) rows, or if the name of a class is longer than
    ``MAX_LABEL_LENGTH`` (300 characters).

    Attributes:
        ids: The ids, all different: an Arrow array (N,).
        images: The images, or the vectors of a source of embeddings. A list of images,
            or an array uint8 (N, H, W, 3), is wrapped as
            :class:`~uno.data.images.InMemory`.
        labels: The class of each row, a dictionary array (N,) as
            :mod:`uno.data.columns` describes it. A row without a label is unlabeled.
        is_train: Whether each row is a training row, bool (N,). Other rows are test
            rows.
        source: Name of the source in messages, such as ``folder:photos``.
        class_names: The classes in their order, if the source declares one. Empty
            otherwise.
        known: The known classes, if the source itself declares them, as the splits of
            ImageNet do. Empty otherwise.
        notes: Lines for the user about how the source was read.
        eval_labels: The true class of each row for evaluation, in the same form as
            ``labels``, null for a row without one. None if the source has no such
            column.
        warnings: Lines for the user about images or labels that are left out.
    """

    ids: pa.LargeStringArray
    images: Images
    labels: pa.DictionaryArray
    is_train: np.ndarray
    source: str
    class_names: tuple[str, ...] = ()
    known: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    eval_labels: pa.DictionaryArray | None = None
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Wrap plain images, and check ids, number of rows and class names.

        Raises:
            ConfigError: Two ids are equal, there are more than ``MAX_ROWS`` (100
                million) rows, or the name of a class in ``labels`` or ``eval_labels``
                is longer than ``MAX_LABEL_LENGTH`` (300 characters).
        """
        object.__setattr__(self, "images", as_images(self.images))
        assert (
            len(self.ids) == len(self.images) == len(self.labels) == len(self.is_train)
        )
        if pa.compute.count_distinct(self.ids).as_py() < len(self):
            counts = self.ids.value_counts()
            is_repeated = pa.compute.greater(counts.field("counts"), 1)
            name = counts.field("values").filter(is_repeated)[0].as_py()
            raise ConfigError(
                f"{self.source}: id {one_line(repr(name))} appears more than once; ids"
                " must be unique"
            )
        if len(self) > MAX_ROWS:
            raise ConfigError(
                f"{self.source}: {len(self):,} rows, more than {MAX_ROWS:,}"
            )
        columns = [c for c in (self.labels, self.eval_labels) if c is not None]
        names = chain(*(column.dictionary.to_pylist() for column in columns))
        long = max(names, key=len, default="")
        if len(long) > MAX_LABEL_LENGTH:
            text = (
                f"a class's name has {len(long):,} characters, more than"
                f" {MAX_LABEL_LENGTH}: {long[:40]!r}"
            )
            raise ConfigError(f"{self.source}: {text}")

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, index: np.ndarray) -> Rows:
        """Return a data set of only some rows. No image is read.

        All columns of these rows are taken; the source, the class names, the known
        classes, notes and warnings stay those of the whole data set. Cached values,
        such as the fingerprint, are not taken over.

        Args:
            index: M different row numbers, int64 (M,). The rows are in this order.

        Raises:
            ConfigError: A row number is given twice, so that two ids are equal.
        """
        truth = None if self.eval_labels is None else self.eval_labels.take(index)
        return replace(
            self,
            ids=self.ids.take(index),
            images=self.images.take(index),
            eval_labels=truth,
            labels=self.labels.take(index),
            is_train=self.is_train[index],
        )

    def with_images(self, images: Images) -> Rows:
        """Return a copy of the rows with the same images in another form.

        For example the new images are decoded. The copy keeps the cached values of this
        object, such as ``fingerprint`` and ``vectors``, which are not computed again
        for the new images. This object is unchanged. Nothing is checked.

        Args:
            images: The images of the N rows.
        """
        rows = copy(self)
        object.__setattr__(rows, "images", images)
        return rows

    def with_composed_names(self) -> Rows:
        """Return the rows with class names in one Unicode form (NFC).

        The same letter, such as é, can be one or two characters in Unicode. Classes
        with names that differ only so become one class, and for each of these a line
        that names the different forms, with escapes for all characters that are not
        ASCII, is added to ``notes`` of the result. The names in ``labels``,
        ``eval_labels``, ``class_names`` and ``known`` are converted. Ids are not.

        Returns:
            A copy of the rows, or this object itself if all names are in this form.
        """
        columns = {"labels": self.labels, "eval_labels": self.eval_labels}
        given = {name: column for name, column in columns.items() if column is not None}
        classes = {name: c.dictionary.to_pylist() for name, c in given.items()}
        names = {*chain(*classes.values(), self.class_names, self.known)}
        if all(name == composed(name) for name in names):
            return self
        changed: dict[str, Any] = {
            name: rename_classes(column, map(composed, classes[name]))
            for name, column in given.items()
        }
        for field_name in ("class_names", "known"):
            renamed = map(composed, getattr(self, field_name))
            changed[field_name] = tuple(dict.fromkeys(renamed))
        spellings = defaultdict[str, list[str]](list)
        for name in sorted(names):
            spellings[composed(name)].append(ascii(name))
        notes = tuple(
            f"class names {', '.join(alike)} differ in Unicode normalization only: they"
            " are one class"
            for alike in spellings.values()
            if len(alike) > 1
        )
        return replace(self, **changed, notes=self.notes + notes)

    @property
    def split(self) -> pa.DictionaryArray:
        """The split of each row, "train" or "test", as a dictionary array (N,)."""
        return pa.DictionaryArray.from_arrays(
            self.is_train.view(np.int8), pa.array(["test", "train"], pa.large_string())
        )

    @property
    def truth(self) -> pa.DictionaryArray:
        """The true class of each row for evaluation, a dictionary array (N,).

        It is the value of ``eval_labels`` if the row has one there, else its label, and
        null if it has neither.
        """
        if self.eval_labels is None:
            return self.labels
        return fill_labels(self.eval_labels, self.labels)

    def ids_of(self, rows: np.ndarray) -> pa.StringArray:
        """Return the ids of the rows with given numbers int64 (n,), in that order."""
        return self.ids.take(rows).cast(pa.string())

    def name_of(self, row: int) -> str:
        """Return the text by which messages name a row.

        Args:
            row: The number of the row.

        Returns:
            The id of the row. It is followed by the absolute path or URI of its image,
            or of the picture of its vector, in parentheses, unless there is no image or
            picture in a file of its own, or the path ends with '/' and the id, or with
            '/' and the id without its first folder.
        """
        (path,) = self.images.paths(np.array([row]))
        return name_row(str(self.ids[row]), path)

    @property
    def times_hash(self) -> str:
        """A SHA-256 of the modification times of all images, 64 hex digits.

        The time of an image is that of the file that holds it, as ``images.times``
        returns it: most sources look it up when they are read. So a data set that is
        read again after such a file was written to has another hash. An image or a
        vector in memory, a missing file and a file of unknown time have a constant
        instead. The hash is computed at each use.
        """
        times = self.images.times(np.arange(len(self)))
        return hashlib.sha256(times.tobytes()).hexdigest()

    @cached_property
    def vectors(self) -> tuple[Tensor, list[str | None]] | None:
        """The vectors of a source of embeddings, and why some rows have none.

        The first value is float32 (N, V, D): each row has one vector of D numbers for
        each of its V views, the evaluation view first, and zeros if it has no usable
        vector. The second value has for each row the reason why it has no usable
        vector, or None. For a source of images, a single None stands in the place of
        both values. The result is cached.
        """
        return self.images.vectors(np.arange(len(self)))

    @property
    def usable(self) -> np.ndarray | None:
        """Which rows have a usable vector, bool (N,).

        None for a source of images: which of them are readable is not known before they
        are decoded.
        """
        return None if self.vectors is None else ok_mask(self.vectors[1])

    @cached_property
    def image_sample(self) -> ImageSample:
        """The facts of at most 64 images (:data:`SAMPLE_SIZE`), evenly spaced.

        They are read and decoded at the first use, and the result is cached. Its
        ``readable`` has the facts of each readable image: format and size, the largest
        value, a sample of the stored values if it is gray with more than 8 bits, and
        whether it has further pages. ``reasons`` maps the row number of each unreadable
        image to the reason, and ``num_rows`` is the number of images of the sample,
        readable or not. For a source of vectors no image is decoded: ``readable`` is
        empty, ``reasons`` has the rows without a usable vector, and ``num_rows`` is N.

        Raises:
            ConfigError: A file that holds many images cannot be read.
            StorageError: An image's file cannot be read now, but perhaps later.
        """
        if self.vectors is not None:
            found = enumerate(self.vectors[1])
            reasons = {row: reason for row, reason in found if reason is not None}
            return ImageSample([], reasons, len(self))
        rows = evenly_spaced(SAMPLE_SIZE, len(self))
        sample = ImageSample([], {}, len(rows))
        for row, facts in map_images(self.images, rows, inspect_image):
            if isinstance(facts, BadImage):
                sample.reasons[row] = str(facts)
            else:
                sample.readable.append(facts)
        return sample

    @cached_property
    def fingerprint(self) -> str:
        """A SHA-256 that identifies the data set, 64 hex digits, cached.

        It covers ids, labels, splits and what :meth:`Images.content_keys` returns:
        the content of images and embeddings in memory (of an item that is a path, this
        path), but only the sizes of the files of a source, of images in tar shards, and
        of the column of images in row groups of Parquet files. So a data set that was
        moved keeps its fingerprint, and so does one with a file that was replaced by
        one of the same size. The order of rows counts. ``eval_labels``, ``class_names``
        and ``known`` do not. For 60,000 JPEG files it takes 0.1 s.
        """
        digest = hashlib.sha256()
        for start in range(0, len(self), PART_ROWS):
            rows = np.arange(start, min(start + PART_ROWS, len(self)))
            for column in (self.ids, self.labels, self.split):
                _update_hash(digest, column.take(rows).cast(pa.large_string()))
            contents = self.images.content_keys(rows)
            if isinstance(contents, pa.Array):
                _update_hash(digest, contents)
                continue
            for content in contents:
                digest.update(len(content).to_bytes(8, "little") + content)
        return digest.hexdigest()


def _update_hash(digest: Any, texts: pa.LargeStringArray) -> None:
    """Add texts to a hash: first the lengths of all in bytes, then the texts.

    Args:
        digest: A hash object of :mod:`hashlib`. It is updated.
        texts: An Arrow array of texts and nulls. A null has the length -1.
    """
    digest.update(pa.compute.binary_length(texts).fill_null(-1).to_numpy())
    digest.update("".join(texts.fill_null("").to_pylist()).encode())
