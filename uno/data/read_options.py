"""How the user wants a data source to be read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from uno.config import DataConfig
from uno.data.files import normalize_path


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
        images_only: Whether the rows are only to be predicted. Labels and splits are
            then not read, every image of a folder is a row, and a row of a table
            without an image path is an unreadable image.
        download: Whether CIFAR may be downloaded.
        imagenet_split: "A", "B" or "C", the 30 novel classes of the benchmark on
            ImageNet; None to keep all classes, of which none is declared known.
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
