"""An encoder's weights from files of every kind, and what its maker says of it."""

import io
import json
import pickle
import re
from unittest.mock import Mock
from urllib.error import URLError

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image

from tests.uno import toy_encoders
from tests.uno.data.builders import failure
from tests.uno.small_run import assert_same, small_config
from tests.uno.test_encoder import TOYS, encoder_of
from uno.augment import eval_view
from uno.config import override
from uno.data.decode import Decoding, decode
from uno.encoders import weights
from uno.encoders.build import build_encoder
from uno.encoders.weights import (
    check_encoder,
    describe_encoder,
    fetch_pretrained,
    load_encoder_,
    read_weights,
)
from uno.errors import StorageError


class Evil:
    """Leaves a file where it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def torch_file(content) -> bytes:
    stream = io.BytesIO()
    torch.save(content, stream)
    return stream.getvalue()


WRAPPED = {
    "plain": lambda state: state,
    "prefix": lambda state: (
        {f"encoder.{k}": v for k, v in state.items()} | {"known.weight": torch.ones(3)}
    ),
    "module": lambda state: {f"module.{k}": v for k, v in state.items()},
    "classifier": lambda state: (
        state | {"fc.weight": torch.ones(10, 16), "fc.bias": torch.ones(10)}
    ),
    "no counters": lambda state: {
        k: v for k, v in state.items() if not k.endswith("num_batches_tracked")
    },
    "nested": lambda state: {"epoch": 3, "model": {"state_dict": state}},
}


@pytest.mark.parametrize(
    ("name", "write"),
    [(name, torch_file) for name in WRAPPED]
    # a safetensors file does not nest
    + [(name, safetensors.torch.save) for name in WRAPPED if name != "nested"],
)
def test_weights_of_any_file_are_found(tmp_path, name, write):
    """Kills: a prefix or a classifier that is refused, nested dicts, counters that
    must be there.
    """
    path = tmp_path / ("w.pt" if write is torch_file else "w.safetensors")
    theirs = encoder_of("resnet_small", width=4).state_dict()
    path.write_bytes(write(WRAPPED[name](dict(theirs))))
    ours = build_encoder(small_config().model)
    load_encoder_(ours, read_weights(str(path)), "w")
    assert_same(ours.state_dict(), theirs)


def test_weights_that_do_not_fit_name_the_keys():
    """Kills: a line without names, or with thousands; a partial load."""
    encoder = encoder_of("resnet_small", width=4)
    before = {k: v.clone() for k, v in encoder.state_dict().items()}
    state = {name: tensor + 1 for name, tensor in before.items()}
    for name in ("conv1.weight", "bn1.weight", "bn1.bias", "bn1.running_mean"):
        del state[name]
    state |= {"stem.weight": torch.ones(1), "layer3.0.conv1.weight": torch.ones(2, 3)}
    assert failure(load_encoder_, encoder, state, "FILE") == (
        "model.weights: FILE does not fit the encoder: keys 4 missing (conv1.weight,"
        " bn1.weight, bn1.bias ...); 1 unexpected (stem.weight); 1 of another shape"
        " (layer3.0.conv1.weight (2, 3) for (16, 8, 3, 3)); --model.encoder names that"
        " of the weights"
    )
    assert_same(encoder.state_dict(), before)


@pytest.mark.parametrize("write", [torch_file, pickle.dumps])
def test_a_pickle_inside_is_refused(tmp_path, write):
    """Kills: weights_only=False, here or as a second try."""
    path, mark = tmp_path / "w.pt", tmp_path / "executed"
    path.write_bytes(write({"model": Evil(str(mark))}))
    with pytest.raises(StorageError, match=r"^model\.weights: [^\n]* would run code"):
        read_weights(str(path))
    assert not mark.exists()


HOLDS_ITSELF: dict = {"epoch": 3}
HOLDS_ITSELF["model"] = HOLDS_ITSELF


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("w.pt", b"", "is not a PyTorch file"),
        ("w.pt", b"PK\x03\x04" + bytes(50), "is not a PyTorch file"),
        ("w.pt", torch_file([1, 2]), "holds no weights by name"),
        ("w.pt", torch_file({"epoch": 3}), "holds no weights by name"),
        ("w.pt", torch_file(HOLDS_ITSELF), "holds no weights by name"),
        ("w.safetensors", b"", "is not a safetensors file"),
        ("w.safetensors", b"not safetensors", "is not a safetensors file"),
        ("w.safetensors", b"\xff" * 64, "is not a safetensors file"),
    ],
)
def test_files_without_weights_are_one_line(tmp_path, name, content, line):
    """Kills: a traceback of safetensors for the user's file."""
    (tmp_path / name).write_bytes(content)
    message = rf"^model\.weights: [^\n]*{name} {line}[^\n]*$"
    with pytest.raises(StorageError, match=message):
        read_weights(str(tmp_path / name))


def test_a_description_of_torchvision_has_the_size_that_is_stored_and_weights():
    """Kills: the crop's share left out, CIFAR's mean."""
    found = describe_encoder("torchvision:efficientnet_b0")
    assert found.weights == "torchvision IMAGENET1K_V1"
    settings = found.settings()
    assert settings["data.mean"] == (0.485, 0.456, 0.406)
    assert settings["data.interpolation"] == "bicubic"
    sizes = ("augment.large.size", "data.stored_size")
    assert [settings[name] for name in sizes] == [224, 256]
    assert [found.settings(112)[name] for name in sizes] == [112, 128]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            f"{TOYS}:vit",
            {
                "augment.large.size": 8,
                "data.stored_size": 8,
                "data.mean": (0.3,) * 3,
                "data.std": (0.4,) * 3,
                "data.interpolation": "bicubic",
            },
        ),
        (f"{TOYS}:maps", {}),
        ("resnet_small", {}),
    ],
)
def test_an_own_encoder_describes_itself_or_not(name, expected):
    assert describe_encoder(name).settings() == expected


@pytest.mark.parametrize(
    ("name", "sizes", "weights"),
    [
        ("tf_efficientnet_lite0", (224, 256), "timm in1k"),
        ("vit_tiny_patch16_224", (224, 248), "timm augreg_in21k_ft_in1k"),
        ("vit_small_patch14_dinov2.lvd142m", (518, 518), "timm lvd142m"),
    ],
)
def test_descriptions_of_timm(name, sizes, weights):
    pytest.importorskip("timm")
    found = describe_encoder(f"timm:{name}")
    assert (found.size, found.settings()["data.stored_size"]) == sizes
    assert (found.weights, found.license) == (weights, "apache-2.0")
    assert found.interpolation == "bicubic"


def timm_encoder(name, **options):
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    return timm.create_model(name, num_classes=0, **options).eval()


@pytest.mark.parametrize(
    "name",
    [
        "vit_small_patch16_dinov3.lvd1689m",
        "vit_xsmall_patch16_clip_224.tinyclip_yfcc15m",
    ],
)
def test_features_of_todays_encoders_are_those_of_timm(name):
    """The size, resizing, crop, normalization and pooling are the encoder's own."""
    theirs = timm_encoder(name)
    from timm.data import create_transform, resolve_data_config

    about = describe_encoder(f"timm:{name}")
    picture = Image.fromarray(
        np.random.default_rng(0).integers(
            256, size=(about.size, about.size, 3), dtype="u1"
        )
    )
    expected = create_transform(**resolve_data_config({}, model=theirs))(picture)
    settings = about.settings()
    stored = decode(
        np.asarray(picture),
        settings["data.stored_size"],
        Decoding(settings["data.interpolation"]),
    )
    view = eval_view(
        torch.tensor(stored)[None],
        settings["augment.large.size"],
        settings["data.mean"],
        settings["data.std"],
    )
    ours = encoder_of(f"timm:{name}").eval()
    ours.load_state_dict(theirs.state_dict())
    with torch.inference_mode():
        torch.testing.assert_close(
            ours(view), theirs(expected[None]), atol=1e-5, rtol=1e-5
        )
    assert ours.num_features == theirs.num_features


def test_a_vision_transformer_takes_the_image_size_of_the_user():
    name, views = "vit_small_patch14_dinov2.lvd142m", torch.randn(2, 3, 112, 112)
    theirs, ours = timm_encoder(name), encoder_of(f"timm:{name}").eval()
    ours.load_state_dict(theirs.state_dict())
    theirs.set_input_size(112)
    with torch.inference_mode():
        torch.testing.assert_close(ours(views), theirs(views), atol=1e-5, rtol=1e-5)


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    """Use the cache of the Hugging Face Hub below ``tmp_path``, and no network.

    Returns the folder of the files of the repository lab/cells.
    """
    pytest.importorskip("timm")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    repository = tmp_path / "models--lab--cells"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("1a2b")
    (repository / "snapshots" / "1a2b").mkdir(parents=True)
    return repository / "snapshots" / "1a2b"


def test_an_own_encoder_may_describe_itself_in_part(monkeypatch):
    monkeypatch.setattr(
        toy_encoders.Tokens, "pretrained_cfg", {"mean": (0.3, 0.4, 0.5)}, raising=False
    )
    found = describe_encoder("tests.uno.toy_encoders:class_token")
    assert (found.size, found.mean, found.std) == (None, (0.3, 0.4, 0.5), None)


def test_a_repository_of_the_hub_gives_an_encoder_and_its_weights(hub_cache):
    about = {"input_size": [3, 96, 96], "mean": [0.7] * 3, "std": [0.2] * 3}
    about |= {"license": "cc-by-nc-4.0", "crop_pct": 1.0, "interpolation": "bilinear"}
    content = {
        "architecture": "test_vit",
        "model_args": {"init_values": 1e-5},
        "pretrained_cfg": about,
    }
    (hub_cache / "config.json").write_text(json.dumps(content))
    name = "timm:hf-hub:lab/cells"
    found = describe_encoder(name)
    assert (found.size, found.mean, found.license) == (96, (0.7,) * 3, "cc-by-nc-4.0")
    encoder = encoder_of(name)
    assert "blocks.0.ls1.gamma" in encoder.state_dict()
    assert encoder(torch.zeros(1, 3, 96, 96)).shape == (1, encoder.num_features)
    (hub_cache / "model.safetensors").write_bytes(
        safetensors.torch.save(encoder.state_dict())
    )
    fetched = safetensors.torch.load(fetch_pretrained(name))
    assert_same(fetched, encoder.state_dict())


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        (
            "lab/cells",
            {"model_type": "dinov2"},
            r"not a repository of timm's.*package\.module",
        ),
        ("lab/cells", {"architecture": "no_such_vit"}, "timm has no 'no_such_vit'"),
        (
            "lab/cells",
            None,
            "config.json cannot be downloaded.*copy another machine's cache",
        ),
        (
            "lab/cells",
            "{",
            "config.json cannot be downloaded.*copy another machine's cache",
        ),
        # a name that no repository can have
        ("org/a--b", None, "org/a--b"),
    ],
)
def test_a_repository_without_an_encoder_of_timm_is_one_line(
    hub_cache, name, content, line
):
    if content is not None:
        text = content if isinstance(content, str) else json.dumps(content)
        (hub_cache / "config.json").write_text(text)
    assert re.search(line, failure(encoder_of, f"timm:hf-hub:{name}"))


def test_an_encoder_that_takes_other_images_is_one_line():
    """Kills: an assertion of torchvision's in the first step, hours later."""
    config = small_config(model__encoder=f"{TOYS}:vit")
    check_encoder(config)
    wrong = override(config, {"augment.large.size": 12, "data.stored_size": 12})
    line = r"^model\.encoder .*:vit does not accept images of 12 px"
    assert re.search(line, failure(check_encoder, wrong))


@pytest.mark.parametrize(
    ("name", "file", "fix"),
    [
        (
            "torchvision:mobilenet_v2",
            r"https://download\.pytorch\.org/models/mobilenet_v2-\w+\.pth.*hub",
            "torchvision:mobilenet_v2 --weights FILE",
        ),
        (
            "resnet18",
            r"https://download\.pytorch\.org/models/resnet18-\w+\.pth.*checkpoints",
            "resnet18 --weights FILE",
        ),
        (
            "timm:test_vit",
            r"https://huggingface\.co/timm/test_vit\.r160_in1k/.*\.safetensors",
            "--weights FILE.*cache",
        ),
    ],
)
def test_pretrained_offline_says_what_to_download_and_where_to_put_it(
    monkeypatch, tmp_path, name, file, fix
):
    """Kills: a traceback, a minute of tries, a line without the address."""
    if name.startswith("timm"):
        pytest.importorskip("timm")
    no_network = Mock(side_effect=URLError("Name or service not known"))
    monkeypatch.setattr("urllib.request.urlopen", no_network)
    monkeypatch.setattr("torch.hub.urlopen", no_network)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    line = rf"^model\.weights pretrained: .*not known.*{file}.*{fix}"
    assert re.search(line, failure(fetch_pretrained, name))


@pytest.mark.parametrize("name", ["resnet_small", f"{TOYS}:vit"])
def test_only_libraries_have_pretrained_weights(name):
    line = f"model.weights pretrained: no library has weights for {name}"
    assert failure(fetch_pretrained, name).startswith(line)


def test_pretrained_weights_are_read_from_the_run_alone(monkeypatch, storage):
    """Kills: a worker or a resumed run that fetches."""
    name = "torchvision:mobilenet_v3_small"
    theirs = dict(encoder_of(name).state_dict())
    monkeypatch.setattr(weights, "_fetch_torchvision", lambda name: theirs)
    storage.write(weights.PRETRAINED_FILE, fetch_pretrained(name))
    monkeypatch.undo()
    ours = build_encoder(small_config(model__encoder=name).model)
    load_encoder_(ours, read_weights("pretrained", storage), "pretrained")
    assert_same(ours.state_dict(), theirs)
