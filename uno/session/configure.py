"""Make a configuration from the settings of the user and the defaults.

A setting that the user gives counts. Any other setting has its default from the last of
three layers that has one:

1. the schema (:mod:`uno.config`);
2. the preset with its recipe, the method, and the description of a library's encoder
   (:func:`list_layers`);
3. the data (:mod:`uno.session.derive`).

:func:`configure` knows the first two layers. ``--explain`` prints the layer of each
value (:func:`explain`). Nothing here imports torch, unless a library describes an
encoder.

The user gives settings on the command line, in YAML files, or as Python keywords. The
command line and keywords win over files.
"""

import json
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
    to_dict,
)
from uno.errors import ConfigError, did_you_mean
from uno.method import DEFAULT
from uno.method import default_settings as method_settings
from uno.presets import (
    FROZEN_PRESETS,
    IMAGE_SIZE,
    SIZES,
    Values,
    is_custom_data,
    merge_layers,
    preset_layers,
    scale_sizes,
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


def configure(
    given: Mapping[str, Any], output: str | None = OUTPUT, choose_method: bool = False
) -> Config:
    """Return the configuration of a run before its data is read.

    Settings that the data decides, such as a batch size that the user has not set, have
    their defaults in it. :func:`uno.session.derive.resolve` completes it.

    Args:
        given: The settings of the user: values by dotted key, such as
            ``{"data.source": "digits", "data.num_novel": 5}``. "preset" is one of the
            keys; without it, the data decides (see :func:`default_preset`). The
            additional key "image_size" is the side of the large views in pixels, to
            which the sizes of small views and of stored images are adapted (see
            :func:`uno.presets.scale_sizes`).
        output: The run directory if the user has not set "output". ``{preset}`` and
            ``{seed}`` in it are replaced. None leaves ``config.output`` None then, for
            commands that write no run. A leading ``~`` of this directory, or of the one
            that the user has set, is replaced by the home directory.
        choose_method: Whether the method becomes ``clustering`` if the preset has a
            frozen encoder ("photos" or "vectors") and the user leaves the method open.
            The user does not if a key of :func:`leaves_method_open` is set: "method",
            "recipe", a key of the sections ``objective`` or ``discover``, a key of
            UNO's heads such as "model.num_heads", or "model.finetune" other than
            "none".

    Raises:
        ConfigError: A setting is unknown, a value is refused or is text that UTF-8
            cannot encode, the preset needs data that the user has not named,
            "image_size" contradicts another size, or the run directory is a relative
            path inside a Ray job.
    """
    require_text(given)
    values = merge_layers(list_layers(given, choose_method))
    user_values = {key: value for key, value in given.items() if key != IMAGE_SIZE}
    if IMAGE_SIZE in given:
        for key in SIZES:
            if user_values.get(key, values[key]) != values[key]:
                raise ConfigError(
                    f"image_size {given[IMAGE_SIZE]} sets {key} to {values[key]}, not"
                    f" {user_values[key]}: give one of them"
                )
    # the preset of the layers has underscores: cifar100_20
    user_values |= {"preset": values["preset"]}
    config = override(Config(), values | user_values)
    if config.output is not None:
        output = config.output
    elif output is not None:
        output = output.format(preset=config.preset, seed=config.seed)
    else:
        return config
    return override(config, {"output": expand_output(output)})


def list_layers(
    given: Mapping[str, Any], choose_method: bool = False
) -> dict[str, Values]:
    """Return the defaults that hold for a run before its data is read.

    A library's encoder, or the user's own one, is built or looked up for its image
    settings.

    Args:
        given: The dotted keys that the user has set, with their values. They decide
            which defaults hold, and are not in the result themselves. Two exceptions:
            the layers of the preset, recipe and method may hold their names, and sizes
            that follow from "image_size" (or, for a library's or the user's own
            encoder, from "augment.large.size") are there with that size itself.
        choose_method: Whether the method becomes ``clustering`` if the preset has a
            frozen encoder and the user leaves the method open, see
            :func:`leaves_method_open`.

    Returns:
        For the name of each layer its values by dotted key, which may be none. The
        layers are "preset NAME", "recipe NAME", "method NAME", "data", "image size" (if
        the user gave "image_size") and "encoder NAME" (NAME is None if neither the user
        nor the preset names an encoder). A later layer wins over an earlier one. A
        setting that is in no layer has the default of the schema.

    Raises:
        ConfigError: There is no such preset, recipe, method or encoder, the image size
            is refused, or the preset is "scratch", "photos" or "vectors" and the user
            has named no data.
    """
    source, two_folders = given.get("data.source"), given.get("data.labeled")
    has_source = source is not None or two_folders is not None
    own_data = two_folders is not None or source not in (None, "digits")
    name = str(given.get("preset", default_preset(given) if own_data else "digits"))
    if name in ("scratch", *FROZEN_PRESETS) and not has_source:
        raise ConfigError(
            f"the preset {name!r} needs --data SOURCE, or --labeled DIR and"
            " --unlabeled DIR"
        )
    layers = preset_layers(name, str(given.get("recipe", "paper")))
    method = str(given.get("method", DEFAULT))
    if choose_method and leaves_method_open(name, given):
        method = FROZEN_METHOD
    layers[f"method {method}"] = method_settings(method, name.replace("-", "_"))
    values = merge_layers(layers)
    layers["data"] = _values_for_source(given, values)
    if IMAGE_SIZE in given:
        base, size = override(Config(), values), given[IMAGE_SIZE]
        layers["image size"] = scale_sizes(base, size)
    encoder = given.get("model.encoder", values.get("model.encoder"))
    size = given.get(IMAGE_SIZE, given.get(SIZES[0]))
    layers[f"encoder {encoder}"] = _image_settings_of(encoder, size)
    return layers


def _values_for_source(given: Mapping[str, Any], preset: Values) -> Values:
    """Return the defaults that depend on whose data the user names.

    The known classes of a preset belong to its data set. They are dropped if the user
    gives ``data.labeled``, or a source of another kind than the preset's (the digits if
    it names none), because hiding labels of another data set would be a silent mistake.
    Independently of this, a share of the labeled rows is held out for validation if the
    data is the user's own and not a benchmark's.

    Args:
        given: The dotted keys that the user has set, with their values.
        preset: The values of the preset by dotted key.

    Returns:
        Values by dotted key: "data.known_classes", which is None, and
        "data.validation_fraction", which is that of the preset, or 0.1 if the preset
        has none. A key is left out if its rule does not apply.
    """
    values, source = Values(), given.get("data.source")
    kind, preset_kind = (
        str(data).partition(":")[0]
        for data in (source, preset.get("data.source", "digits"))
    )
    if given.get("data.labeled") is not None or (
        source is not None and kind != preset_kind
    ):
        values["data.known_classes"] = None
    if is_custom_data(given):
        values["data.validation_fraction"] = (
            preset.get("data.validation_fraction") or VALIDATION_FRACTION
        )
    return values


def explain(
    config: Config,
    final: Config,
    file: Mapping[str, Any],
    line: Mapping[str, Any],
    derived: str = "data",
) -> list[str]:
    """Return the configuration of a run as YAML, with the origin of each value.

    Each line is a dotted key, its value as JSON, and its origin in a comment:
    "default", the name of a layer of :func:`list_layers` such as "preset digits",
    ``derived``, "file" or "command line". ``--config`` reads such a file.

    Args:
        config: The configuration before the data is read, from :func:`configure`.
        final: The configuration of the run, from :func:`uno.session.derive.resolve`.
        file: The settings from YAML files, by dotted key.
        line: The settings from the command line, by dotted key. They win over those of
            ``file``.
        derived: The text for the origin of values in which ``final`` differs from
            ``config``, unless the user gave them.

    Returns:
        One line of text for each setting of ``final``, in schema order.
    """
    given = merge_settings(file, line)
    before, values = flatten(to_dict(config)), flatten(to_dict(final))
    origins = dict.fromkeys(values, "default")
    # the method counts as given, because it may have been chosen
    for name, layer in list_layers(given | {"method": config.method}).items():
        origins |= dict.fromkeys(layer, name)
    origins |= {key: derived for key in values if values[key] != before[key]}
    for key in given:
        keys = SIZES if key == IMAGE_SIZE else (key,)
        origins |= dict.fromkeys(keys, "command line" if key in line else "file")
    return [
        f"{f'{key}: {json.dumps(value)}':<60}  # {origins[key]}"
        for key, value in values.items()
    ]


def require_text(given: Mapping[str, Any]) -> None:
    """Check that the values of settings can be written to a UTF-8 text file.

    In a locale without UTF-8, Python reads other characters of a command line as
    surrogates, which UTF-8 cannot encode.

    Args:
        given: The dotted keys that the user has set, with their values. Only values
            that are text are checked.

    Raises:
        ConfigError: A value has such characters.
    """
    for key, value in given.items():
        if isinstance(value, str) and value != value.encode(errors="replace").decode():
            text = f"{key} {value!a} has characters that this locale does not know"
            fix = "set a UTF-8 locale, such as LC_ALL=C.UTF-8, or use another name"
            raise ConfigError(f"{text}; {fix}")


def leaves_method_open(preset_name: str, given: Mapping[str, Any]) -> bool:
    """Return whether the user leaves the choice of the method to this program.

    This is so if the preset has a frozen encoder ("photos" or "vectors"), and the user
    has set none of these: "method", "recipe", a key of the sections ``objective`` and
    ``discover``, a key of UNO's heads (:data:`UNO_KEYS`, such as "model.num_heads"),
    and "model.finetune" with a value other than "none".

    Args:
        preset_name: The name of the preset, such as "photos".
        given: The dotted keys that the user has set, with their values.
    """
    uno_sections, uno_keys = (
        ("objective.", "discover."),
        ("method", "recipe", *UNO_KEYS),
    )
    of_uno = [key for key in given if key.startswith(uno_sections) or key in uno_keys]
    return (
        preset_name in FROZEN_PRESETS
        and given.get("model.finetune", "none") == "none"
        and not of_uno
    )


def _image_settings_of(encoder: Any, size: Any) -> dict[str, Any]:
    """Return the image settings that a library's or the user's own encoder asks for.

    Args:
        encoder: The value of ``model.encoder``: the name of an encoder of this package
            ("resnet18"), "timm:NAME", "torchvision:NAME", "vectors:D" for vectors of D
            numbers, or "package.module:callable" for the user's own code. None counts
            as an encoder of this package.
        size: The image size in pixels that the user has set. It replaces the encoder's
            own size, which None keeps.

    Returns:
        The sizes of large views and of stored images, mean, standard deviation and
        interpolation by dotted key, such as "data.mean". Values that are not known are
        left out. Empty for the encoders of this package, and for vectors.

    Raises:
        ConfigError: There is no such encoder, its library is not installed, the value
            has another form, or the size is refused.
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
    from uno.encoders.weights import describe_encoder

    return describe_encoder(checked.model.encoder).settings(
        size and checked.augment.large.size
    )


def default_preset(given: Mapping[str, Any]) -> str:
    """Return the preset that applies if the user names none.

    Only the settings decide, never the files of this machine, so that a command means
    the same everywhere.

    Args:
        given: The dotted keys that the user has set, with their values.

    Returns:
        ``scratch`` for benchmark data, and ``vectors`` for a source of vectors. (For
        the digits :func:`list_layers` takes the preset ``digits`` without asking.) For
        other images, if neither the encoder nor its weights are set: ``scratch`` if
        ``model.finetune`` asks to train the encoder, else ``photos``. If one of them is
        set: ``photos`` if the weights are "pretrained", or are a file (.safetensors,
        .pt or .pth) for an encoder of a library or of the user's own code, and
        ``scratch`` otherwise, whatever ``model.finetune`` is.
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


def expand_output(output: str) -> str:
    """Return the output directory with a leading ``~`` replaced by the home directory.

    Args:
        output: The directory that the user gave, a path or URI.

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


def is_torchrun_rank() -> bool:
    """Return whether ``torchrun`` started this process as one of its ranks.

    This is so if all environment variables of :data:`TORCHRUN_VARIABLES` are set, such
    as ``RANK``.
    """
    return all(name in os.environ for name in TORCHRUN_VARIABLES)


def merge_settings(file: Mapping[str, Any], line: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the settings of files and of the command line, which takes precedence.

    ``data.source`` on the command line also replaces ``data.labeled`` and
    ``data.unlabeled`` of a file (but not the other way round). "image_size" on the
    command line replaces the sizes of views and of stored images in a file.

    Args:
        file: The settings from YAML files, by dotted key.
        line: The settings from the command line, by dotted key.

    Returns:
        The settings of both, by dotted key.

    Raises:
        ConfigError: The command line has both ``data.source`` and ``data.labeled``.
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
    0.1}``). An underscore and a dash are the same. ``config`` is a YAML file, a
    mapping, or a list of them, where a later one wins. The other keywords win over
    ``config``.

    Args:
        settings: The keyword arguments, values by keyword. A path becomes text, a list
            of texts becomes one text with commas, and a NumPy scalar or a tensor
            without dimensions becomes a Python value. Other values, and all values
            inside ``config``, stay as they are. No value is checked, except for the
            name of the method.

    Returns:
        The values by dotted key, such as "train.batch_size", or "image_size". Only what
        the keywords and ``config`` set is in it, no defaults.

    Raises:
        ConfigError: A keyword other than ``config`` names no setting, there is no such
            method, a file of ``config`` cannot be read, or the keywords name both
            ``data`` and ``labeled``. Keys inside ``config`` are not checked here.
    """
    file, line = dict[str, Any](), dict[str, Any]()
    config = settings.get("config", [])
    for part in config if isinstance(config, list | tuple) else [config]:
        file |= flatten(part) if isinstance(part, Mapping) else load_yaml(part)
    keys = {"image-size": IMAGE_SIZE}
    for key in field_names(str(settings.get("method", file.get("method", DEFAULT)))):
        keys[with_dashes(key)] = key
        if (short := field_traits(key).flag) is not None:
            keys[short] = key
    for name, value in settings.items():
        if name == "config":
            continue
        for key, each in flatten({name: value}).items():
            if with_dashes(key) not in keys:
                hint = suggest_name(key, [*keys, "config"], keyword=True)
                raise ConfigError(f"unknown setting {key!r}{hint}")
            line[keys[with_dashes(key)]] = _plain(each)
    return merge_settings(file, line)


def _plain(value: Any) -> Any:
    """Convert a Python value to the form in which a YAML file would hold it.

    A path becomes text, a list or tuple of texts becomes one text with commas unless it
    is empty, and a NumPy scalar, or an array or tensor without dimensions, becomes a
    Python value such as a number. Other values are returned unchanged.
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


def suggest_name(name: str, names: Iterable[str], keyword: bool = False) -> str:
    """Return the end of an error message that suggests settings for an unknown name.

    An example is ``; did you mean --batch-size?``. Up to three names are suggested that
    end with ``.NAME``, or else begin with ``NAME.``, or else the most similar name. If
    there is none, the message points to the help: ``; see --help-all``.

    Args:
        name: The unknown name, without the dashes of an option.
        names: The names of all settings, with dashes.
        keyword: Whether the name is a Python keyword and not an option of a command.
            The suggestions are then in quotes and with underscores, and the help is
            ``uno discover --help-all``.
    """
    word, known = with_dashes(name), list(names)
    likely = [flag for flag in known if flag.endswith(f".{word}")][:3]
    likely = likely or [flag for flag in known if flag.startswith(f"{word}.")][:3]
    if keyword:
        see = f"see uno discover {HELP_ALL}"
        return did_you_mean(
            word, known, see, lambda flag: repr(flag.replace("-", "_")), likely
        )
    return did_you_mean(word, known, f"see {HELP_ALL}", "--{}".format, likely)


def with_dashes(name: str) -> str:
    """Replace the underscores of a setting's key by dashes, as options are written."""
    return name.replace("_", "-")
