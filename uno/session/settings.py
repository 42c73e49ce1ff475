"""Merge the settings of the user with the defaults to a configuration.

Settings come from the command line, from YAML files or from Python keywords. In order
of rising precedence, a value comes from: the schema's default, the preset, the method,
the description of a library's encoder, a YAML file, the command line. Without a preset
of the user, the digits use the preset ``digits`` and other data uses
:func:`own_preset`.

A preset's known classes belong to its own data set. With another kind of source they
are dropped unless the user gives known classes, because hiding the labels of another
data set's classes would be a silent mistake.

What depends on the data is decided in :mod:`uno.session.resolve`. Nothing here imports
torch, unless a library describes an encoder.
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
from uno.methods import default_settings as method_settings
from uno.presets import (
    IMAGE_SIZE,
    SIZES,
    apply_image_size,
    is_custom_data,
    preset_values,
)

# share of the labeled rows that is held out if no test row has a known class
VALIDATION_FRACTION = 0.1
FROZEN_METHOD = "clustering"
UNO_KEYS = tuple(
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
TORCHRUN_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
# Ray sets this variable for the entrypoint of a submitted job
RAY_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"


def completed(
    given: Mapping[str, Any], output: str | None = OUTPUT, choose: bool = False
) -> dict[str, Any]:
    """Add the settings of the preset, the method and the encoder to the user's.

    The values are not validated yet.

    Args:
        given: The dotted keys that the user has set, with their values.
        output: The run directory if the user gives none. ``{preset}`` and ``{seed}`` in
            it are replaced.
        choose: Whether the method becomes ``clustering`` if the preset has a frozen
            encoder and the user has set no method and nothing of UNO's training.

    Returns:
        Values by dotted key.

    Raises:
        ConfigError: There is no such preset, recipe, method or encoder.
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
    # the sizes of views keep the proportions of this configuration
    base = override(Config(), values) if IMAGE_SIZE in own else Config()
    encoder, size = (
        (values | own).get("model.encoder"),
        own.get(IMAGE_SIZE, own.get(SIZES[0])),
    )
    values |= apply_image_size(base, own, _image_settings_of(encoder, size))
    if values.get("output") is None:
        seed = values.get("seed", 0)
        # the seed as it is after validation: 1 and not 1.0 or True
        seed = f"{seed:.0f}" if isinstance(seed, bool | float) else seed
        values["output"] = output and output.format(preset=values["preset"], seed=seed)
    if isinstance(values["output"], str):
        values["output"] = checked_output(values["output"])
    return values


def require_text(given: Mapping[str, Any]) -> None:
    """Check that the settings can be written to a text file.

    In a locale without UTF-8, Python reads other characters of a command line as bytes
    that no text can hold.

    Raises:
        ConfigError: A value has such characters.
    """
    for key, value in given.items():
        if isinstance(value, str) and value != value.encode(errors="replace").decode():
            text = f"{key} {value!a} has characters that this locale does not know"
            fix = "set a UTF-8 locale, such as LC_ALL=C.UTF-8, or use another name"
            raise ConfigError(f"{text}; {fix}")


def leaves_choice(preset_name: str, given: Mapping[str, Any]) -> bool:
    """Return whether the user leaves the choice of the method to this program.

    This is so if the preset has a frozen encoder ("photos" or "vectors"), and the user
    has set neither a method, nor fine-tuning, nor any setting of UNO or of its
    training.

    Args:
        preset_name: The name of the preset.
        given: The dotted keys that the user has set, with their values.
    """
    uno_sections, uno_keys = (
        ("objective.", "discover."),
        ("method", "recipe", *UNO_KEYS),
    )
    own = [key for key in given if key.startswith(uno_sections) or key in uno_keys]
    return (
        preset_name in ("photos", VECTORS)
        and given.get("model.finetune", "none") == "none"
        and not own
    )


def _image_settings_of(encoder: Any, size: Any) -> dict[str, Any]:
    """Return the image settings that a library's or the user's own encoder asks for.

    Args:
        encoder: The value of ``model.encoder``.
        size: The image size in pixels that the user has set, or None. It replaces the
            encoder's own size.

    Returns:
        Image size, mean, standard deviation and interpolation by dotted key. Empty for
        the encoders of this program, and for vectors.
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
    """Return the output directory with ``~`` replaced by the home directory.

    Raises:
        ConfigError: The path is relative inside a Ray job. The working directory of a
            job is deleted with the job.
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
    """Return whether ``torchrun`` started this process as one of its ranks."""
    return all(name in os.environ for name in TORCHRUN_VARIABLES)


def merged(file: Mapping[str, Any], line: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the settings of files and of the command line, which takes precedence.

    A source on the command line also replaces the two folders of a file, and one image
    size replaces the sizes of all views.

    Args:
        file: The settings from YAML files, by dotted key.
        line: The settings from the command line, by dotted key.

    Raises:
        ConfigError: The command line has both a source and two folders.
    """
    if {"data.source", "data.labeled"} <= line.keys():
        raise ConfigError("give either --data or --labeled and --unlabeled, not both")
    replaced = ("data.labeled", "data.unlabeled") * ("data.source" in line)
    replaced += SIZES * (IMAGE_SIZE in line)
    return {key: value for key, value in file.items() if key not in replaced} | dict(
        line
    )


def from_keywords(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Convert keyword arguments to settings by dotted key.

    A keyword is a short name (``batch_size=64``), a section with a mapping
    (``objective={"epsilon": 0.1}``) or a dotted name (``**{"objective.epsilon":
    0.1}``). ``config`` is a YAML file, a mapping, or a list of them.

    Raises:
        ConfigError: There is no such setting.
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
    """Return a Python value as a YAML file would hold it.

    A path becomes text, a list of class names becomes text with commas, and a NumPy
    scalar becomes a number.
    """
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if (
        isinstance(value, list | tuple)
        and value
        and all(isinstance(word, str) for word in value)
    ):
        return ",".join(value)
    return value.item() if getattr(value, "ndim", None) == 0 else value


def similar(name: str, names: Iterable[str], keyword: bool = False) -> str:
    """Suggest which setting an unknown name means, as the end of an error message.

    Args:
        name: The unknown name, without the dashes of an option.
        names: The names of all settings.
        keyword: Whether the name is a Python keyword and not an option.
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
    """Return a key as it is written in an option: with dashes for underscores."""
    return name.replace("_", "-")
