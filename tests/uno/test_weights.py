"""An encoder's weights from files of every kind, and what its maker says of it."""

import io
import json
import pickle
import re
from urllib.error import URLError

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image

from tests.uno import toy_encoders
from tests.uno.small_run import small_config
from tests.uno.test_encoder import TOYS, encoder_of
from uno.augment import eval_view
from uno.data.decode import Decoding, decode
from uno.data.files import Storage
from uno.encoders import weights
from uno.encoders.build import build_encoder
from uno.encoders.weights import (
    Description,
    check_encoder,
    describe_encoder,
    fetch_pretrained,
    load_encoder_,
    read_weights,
)
from uno.errors import ConfigError, StorageError

SMALL = dict(width=4)


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


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: state,
        lambda state: (
            {f"encoder.{k}": v for k, v in state.items()}
            | {"known.weight": torch.ones(3)}
        ),
        lambda state: {f"module.{k}": v for k, v in state.items()},
        lambda state: (
            state | {"fc.weight": torch.ones(10, 16), "fc.bias": torch.ones(10)}
        ),
        lambda state: {
            k: v for k, v in state.items() if not k.endswith("num_batches_tracked")
        },
        lambda state: {"epoch": 3, "model": {"state_dict": state}},
    ],
)
def test_weights_of_any_file_are_found(tmp_path, suffix, wrap):
    """Kills: a prefix or a classifier that is refused, nested dicts, counters that
    must be there.
    """
    theirs, ours = (
        encoder_of("resnet_small", **SMALL),
        build_encoder(small_config().model),
    )
    content = wrap(dict(theirs.state_dict()))
    if suffix == ".safetensors" and "model" in content:
        pytest.skip("a safetensors file does not nest")
    data = (
        safetensors.torch.save(content)
        if suffix == ".safetensors"
        else torch_file(content)
    )
    (tmp_path / f"w{suffix}").write_bytes(data)
    load_encoder_(ours, read_weights(str(tmp_path / f"w{suffix}")), "w")
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], tensor), name


def test_weights_that_do_not_fit_name_the_keys():
    """Kills: a line without names, or with thousands; a partial load."""
    encoder = encoder_of("resnet_small", **SMALL)
    state, before = (
        dict(encoder.state_dict()),
        {k: v.clone() for k, v in encoder.state_dict().items()},
    )
    for name in ("conv1.weight", "bn1.weight", "bn1.bias", "bn1.running_mean"):
        del state[name]
    state |= {"stem.weight": torch.ones(1), "layer3.0.conv1.weight": torch.ones(2, 3)}
    state = {name: tensor + 1 for name, tensor in state.items()}
    line = (
        "model.weights: FILE does not fit the encoder: keys 4 missing (conv1.weight,"
        " bn1.weight, bn1.bias ...); 1 unexpected (stem.weight); 1 of another shape"
        " (layer3.0.conv1.weight (2, 3) for (16, 8, 3, 3)); --model.encoder names that"
        " of the weights"
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(line)}$"):
        load_encoder_(encoder, state, "FILE")
    assert all(torch.equal(before[k], v) for k, v in encoder.state_dict().items())


def test_a_pickle_inside_is_refused(tmp_path):
    """Kills: weights_only=False, here or as a second try."""
    mark = tmp_path / "executed"
    (tmp_path / "w.pt").write_bytes(torch_file({"model": Evil(str(mark))}))
    (tmp_path / "plain.pth").write_bytes(pickle.dumps(Evil(str(mark))))
    for name in ("w.pt", "plain.pth"):
        with pytest.raises(
            StorageError, match=r"^model\.weights: .* would run code"
        ) as error:
            read_weights(str(tmp_path / name))
        assert "\n" not in str(error.value)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"", "is not a PyTorch file"),
        (b"PK\x03\x04" + bytes(50), "is not a PyTorch file"),
        (torch_file([1, 2]), "holds no weights by name"),
        (torch_file({"epoch": 3}), "holds no weights by name"),
    ],
)
def test_files_without_weights_are_one_line(tmp_path, content, line):
    (tmp_path / "w.pt").write_bytes(content)
    with pytest.raises(
        StorageError, match=rf"^model\.weights: .*w\.pt {line}"
    ) as error:
        read_weights(str(tmp_path / "w.pt"))
    assert "\n" not in str(error.value)


def test_descriptions_are_the_libraries():
    """Kills: the crop's share left out, CIFAR's mean, the interpolation of another
    library.
    """
    found = describe_encoder("torchvision:efficientnet_b0")
    assert (found.size, found.interpolation, found.mean) == (
        224,
        "bicubic",
        (0.485, 0.456, 0.406),
    )
    assert found.settings()["data.stored_size"] == 256
    assert found.settings(112) | {"data.stored_size": 128} == found.settings(112)
    assert found.weights == "torchvision IMAGENET1K_V1"
    own = {
        "augment.large.size": 8,
        "data.stored_size": 8,
        "data.mean": (0.3,) * 3,
        "data.std": (0.4,) * 3,
    }
    assert describe_encoder(f"{TOYS}:vit").settings() == own | {
        "data.interpolation": "bicubic"
    }
    assert (
        describe_encoder(f"{TOYS}:maps").settings()
        == describe_encoder("resnet_small").settings()
        == {}
    )


@pytest.mark.parametrize(
    ("name", "size", "store", "weights"),
    [
        ("tf_efficientnet_lite0", 224, 256, "timm in1k"),
        ("vit_tiny_patch16_224", 224, 248, "timm augreg_in21k_ft_in1k"),
        ("vit_small_patch14_dinov2.lvd142m", 518, 518, "timm lvd142m"),
    ],
)
def test_descriptions_of_timm(name, size, store, weights):
    pytest.importorskip("timm")
    found = describe_encoder(f"timm:{name}")
    assert (found.size, found.settings()["data.stored_size"], found.weights) == (
        size,
        store,
        weights,
    )
    assert (found.license, found.interpolation) == ("apache-2.0", "bicubic")


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
    assert fetched.keys() == encoder.state_dict().keys()
    assert all(fetched[k].equal(v) for k, v in encoder.state_dict().items())


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ({"model_type": "dinov2"}, r"not a repository of timm's.*package\.module"),
        ({"architecture": "no_such_vit"}, "timm has no 'no_such_vit'"),
        (None, "config.json cannot be downloaded.*copy another machine's cache"),
    ],
)
def test_a_repository_without_an_encoder_of_timm_is_one_line(hub_cache, content, line):
    if content is not None:
        (hub_cache / "config.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=line) as error:
        encoder_of("timm:hf-hub:lab/cells")
    assert "\n" not in str(error.value)


def test_an_encoder_that_takes_other_images_is_one_line():
    """Kills: an assertion of torchvision's in the first step, hours later."""
    config = small_config(model__encoder=f"{TOYS}:vit")
    check_encoder(config)
    wrong = small_config(
        model__encoder=f"{TOYS}:vit", augment__large__size=12, data__stored_size=12
    )
    with pytest.raises(
        ConfigError, match=r"^model\.encoder .*:vit does not accept images of 12 px"
    ):
        check_encoder(wrong)


@pytest.mark.parametrize(
    ("name", "file", "folder"),
    [
        (
            "torchvision:mobilenet_v2",
            r"https://download\.pytorch\.org/models/mobilenet_v2-\w+\.pth",
            "hub",
        ),
        (
            "resnet18",
            r"https://download\.pytorch\.org/models/resnet18-\w+\.pth",
            "checkpoints",
        ),
        (
            "timm:test_vit",
            r"https://huggingface\.co/timm/test_vit\.r160_in1k/.*\.safetensors",
            "cache",
        ),
    ],
)
def test_pretrained_offline_says_what_to_download_and_where_to_put_it(
    monkeypatch, tmp_path, name, file, folder
):
    """Kills: a traceback, a minute of tries, a line without the address."""
    if name.startswith("timm"):
        pytest.importorskip("timm")

    def no_network(*args, **kwargs):
        raise URLError("Name or service not known")

    monkeypatch.setattr("urllib.request.urlopen", no_network)
    monkeypatch.setattr("torch.hub.urlopen", no_network)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    fix = "--weights FILE" if name.startswith("timm") else f"{name} --weights FILE"
    line = rf"^model\.weights pretrained: .*not known.*{file}.*{fix}"
    with pytest.raises(ConfigError, match=line) as error:
        fetch_pretrained(name)
    assert "\n" not in str(error.value) and folder in str(error.value)


@pytest.mark.parametrize("name", ["resnet_small", f"{TOYS}:vit"])
def test_only_libraries_have_pretrained_weights(name):
    with pytest.raises(
        ConfigError,
        match=rf"^model\.weights pretrained: no library has weights for {name}",
    ):
        fetch_pretrained(name)


def test_pretrained_weights_are_read_from_the_run_alone(monkeypatch, tmp_path):
    """Kills: a worker or a resumed run that fetches."""
    theirs = encoder_of("torchvision:mobilenet_v3_small")
    monkeypatch.setattr(
        weights, "_fetch_torchvision", lambda name: dict(theirs.state_dict())
    )
    storage = Storage(str(tmp_path))
    storage.write(
        weights.PRETRAINED_FILE, fetch_pretrained("torchvision:mobilenet_v3_small")
    )
    ours = build_encoder(
        small_config(model__encoder="torchvision:mobilenet_v3_small").model
    )
    load_encoder_(ours, read_weights("pretrained", storage), "pretrained")
    assert all(
        torch.equal(ours.state_dict()[k], v) for k, v in theirs.state_dict().items()
    )
    assert Description().settings() == {}
