"""From the settings that somebody gives, on a command line, in files or as keywords, to
a configuration.

Precedence: defaults < preset < method < the description of an encoder from a library <
YAML < command line. Values start from the preset that was given; otherwise from
``digits`` for the digits and from
:func:`own_preset` for any other data. A preset's known classes are those of its own
data set: with another kind of source they are dropped unless they are given too,
because hiding the labels of somebody else's classes would be a silent mistake. Whatever
else the data decides: :mod:`uno.session.resolve`. Nothing here imports torch but where
a library describes an encoder.
"""

import os
from collections.abc import Iterable, Mapping
from typing import Any

from uno.config import (
    OWN_ENCODERS,
    VECTORS,
    Config,
    field_names,
    field_traits,
    flatten,
    load_yaml,
    override,
)
from uno.errors import ConfigError, did_you_mean
from uno.methods import DEFAULT
from uno.methods.registry import settings as method_settings
from uno.presets import (
    IMAGE_SIZE,
    SIZES,
    apply_image_size,
    is_custom_data,
    preset_values,
)

# of the labeled rows of one's own images, where no test row is of a known class
VALIDATION_FRACTION = 0.1
FROZEN_METHOD = "clustering"
OF_UNO = tuple(
    f"model.{name}"
    for name in (
        "num_heads",
        "overcluster_factor",
        "hidden_dim",
        "projection_dim",
        "prototype_init",
        "mlp_input",
    )
)
OUTPUT = "runs/{preset}-seed{seed}"
HELP_ALL = "--help-all"
LAUNCHED = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
# set by Ray's job supervisor for the entrypoint of a submitted job
RAY_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"


def completed(
    given: Mapping[str, Any], output: str | None = OUTPUT, choose: bool = False
) -> dict[str, Any]:
    """All dotted keys, not checked yet, that ``given`` ones lead to; ``output``: the
    run directory where none is given, with places for ``preset`` and ``seed``;
    ``choose``: where :func:`leaves_choice`, the method is ``clustering``. ConfigError:
    no such preset, recipe, method or encoder.
    """
    own = dict(given)
    require_text(own)
    source, two_folders = own.get("data.source"), own.get("data.labeled") is not None
    own_data = two_folders or source not in (None, "digits")
    name = str(own.pop("preset", own_preset(own) if own_data else "digits"))
    if name in ("scratch", "photos", VECTORS) and source is None and not two_folders:
        raise ConfigError(
            f"the preset {name!r} needs --data SOURCE, or --labeled DIR and"
            " --unlabeled DIR"
        )
    if choose and leaves_choice(name, own):
        own["method"] = FROZEN_METHOD
    values = preset_values(name, str(own.pop("recipe", "paper")))
    values |= method_settings(str(own.get("method", DEFAULT)), values["preset"])
    kinds = {
        str(data).partition(":")[0]
        for data in (source, values.get("data.source", "digits"))
    }
    if two_folders or (source is not None and len(kinds) > 1):
        values["data.known_classes"] = None
    if is_custom_data(own):
        values["data.validation_fraction"] = (
            values.get("data.validation_fraction") or VALIDATION_FRACTION
        )
    # in whose proportions sizes are
    base = override(Config(), values) if IMAGE_SIZE in own else Config()
    encoder, size = (
        (values | own).get("model.encoder"),
        own.get(IMAGE_SIZE, own.get(SIZES[0])),
    )
    values |= apply_image_size(base, own, _described(encoder, size))
    if values.get("output") is None:
        seed = values.get("seed", 0)
        # as the checked number
        seed = f"{seed:.0f}" if isinstance(seed, bool | float) else seed
        values["output"] = output and output.format(preset=values["preset"], seed=seed)
    if isinstance(values["output"], str):
        values["output"] = checked_output(values["output"])
    return values


def require_text(given: Mapping[str, Any]) -> None:
    """Check that the settings can be written to a file of text.

    In a locale without UTF-8, Python reads other characters of a command line as bytes
    that no text can hold.

    Raises:
        ConfigError: A value is no text.
    """
    for key, value in given.items():
        if isinstance(value, str) and value != value.encode(errors="replace").decode():
            text = f"{key} {value!a} has characters that this locale does not know"
            fix = "set a UTF-8 locale, such as LC_ALL=C.UTF-8, or use another name"
            raise ConfigError(f"{text}; {fix}")


def leaves_choice(preset_name: str, given: Mapping[str, Any]) -> bool:
    """Whether ``given`` keys set no method and nothing of UNO or its training, and
    the preset is frozen.
    """
    uno_sections, uno_keys = ("objective.", "discover."), ("method", "recipe", *OF_UNO)
    own = [key for key in given if key.startswith(uno_sections) or key in uno_keys]
    return (
        preset_name in ("photos", VECTORS)
        and given.get("model.finetune", "none") == "none"
        and not own
    )


def _described(encoder: Any, size: Any) -> dict[str, Any]:
    """Size (``size`` if given), mean, std and interpolation that a library's or
    user's encoder takes.
    """
    if (
        encoder is None
        or encoder in OWN_ENCODERS
        or str(encoder).partition(":")[0] == VECTORS
    ):
        return {}
    checked = override(
        Config(), {"model.encoder": encoder, **({SIZES[0]: size} if size else {})}
    )
    from uno.weights import describe_encoder

    return describe_encoder(checked.model.encoder).settings(
        size and checked.augment.large.size
    )


def own_preset(given: Mapping[str, Any]) -> str:
    """Return the preset of the user's own data, if the user names none.

    Only the settings decide, never the files of this machine, so that a command means
    the same everywhere.

    Args:
        given: The dotted keys that the user has set.

    Returns:
        ``vectors`` for vectors. ``photos`` for pretrained weights of an encoder from a
        library, and for images without any setting of the encoder. ``scratch`` for
        benchmark data, and wherever the settings ask for an encoder that is trained.
    """
    encoder, weights = given.get("model.encoder"), given.get("model.weights")
    if not is_custom_data(given):
        return "scratch"
    if str(given.get("data.source")).partition(":")[0] == VECTORS:
        return VECTORS
    if weights is None and encoder is None:
        is_frozen = given.get("model.finetune") in (None, "none")
        return "photos" if is_frozen else "scratch"
    file = str(weights).partition("?")[0].endswith(
        (".safetensors", ".pt", ".pth")
    ) and ":" in str(encoder)
    return "photos" if file or weights == "pretrained" else "scratch"


def checked_output(output: str) -> str:
    """A directory to write to, ``~`` replaced; a relative one inside a Ray job is a
    ConfigError.
    """
    output = os.path.expanduser(output)
    if RAY_JOB in os.environ and not os.path.isabs(output) and "://" not in output:
        why = "the job's working directory is deleted with the job"
        raise ConfigError(
            "inside a Ray job --output must be an absolute path or a URI, not"
            f" {output!r}: {why}"
        )
    return output


def launched() -> bool:
    """Whether this process is one of the ranks that ``torchrun`` has started."""
    return all(name in os.environ for name in LAUNCHED)


def merged(file: Mapping[str, Any], line: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys of files and of a line, which wins: a source there replaces the two
    folders of a file, one size of images the sizes. ConfigError: the line has two kinds
    of data.
    """
    if {"data.source", "data.labeled"} <= line.keys():
        raise ConfigError("give either --data or --labeled and --unlabeled, not both")
    replaced = ("data.labeled", "data.unlabeled") * ("data.source" in line)
    replaced += SIZES * (IMAGE_SIZE in line)
    return {key: value for key, value in file.items() if key not in replaced} | dict(
        line
    )


def from_keywords(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments as dotted keys: ``batch_size=64``,
    ``objective={"epsilon": 0.1}``, ``**{"objective.epsilon": 0.1}``, and ``config``: a
    YAML file, a mapping, or a list of them.
    """
    file, line = dict[str, Any](), dict[str, Any]()
    config = settings.get("config", [])
    for part in config if isinstance(config, list | tuple) else [config]:
        file |= flatten(part) if isinstance(part, Mapping) else load_yaml(part)
    keys = {"image-size": IMAGE_SIZE}
    for key in field_names(str(settings.get("method", file.get("method", DEFAULT)))):
        keys[dashed(key)] = key
        if (short := field_traits(key).flag) is not None:
            keys[short] = key
    for name, value in settings.items():
        if name == "config":
            continue
        for key, each in flatten({name: value}).items():
            if dashed(key) not in keys:
                raise ConfigError(
                    f"unknown setting {key!r}{similar(key, [*keys, 'config'], True)}"
                )
            line[keys[dashed(key)]] = _plain(each)
    return merged(file, line)


def _plain(value: Any) -> Any:
    """A value from Python as a YAML file would hold it."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if (
        isinstance(value, list | tuple)
        and value
        and all(isinstance(word, str) for word in value)
    ):
        return ",".join(value)  # names of classes
    # a number of numpy's
    return value.item() if getattr(value, "ndim", None) == 0 else value


def similar(name: str, names: Iterable[str], keyword: bool = False) -> str:
    """Suggest what ``name``, a flag without its dashes or a ``keyword``, was meant
    to be.
    """
    word, known = dashed(name), list(names)
    likely = [flag for flag in known if flag.endswith(f".{word}")][:3]
    likely = likely or [flag for flag in known if flag.startswith(f"{word}.")][:3]
    if keyword:
        see = f"see uno discover {HELP_ALL}"
        return did_you_mean(
            word, known, see, lambda flag: repr(flag.replace("-", "_")), likely
        )
    return did_you_mean(word, known, f"see {HELP_ALL}", "--{}".format, likely)


def dashed(name: str) -> str:
    """A key as options have it."""
    return name.replace("_", "-")
