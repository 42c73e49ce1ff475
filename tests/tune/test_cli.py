"""``uno tune``'s options and what is refused before anything starts."""

from contextlib import nullcontext
from unittest.mock import Mock

import pytest

from pipelines import ray_env
from pipelines.options import parse
from tests.pipelines.small import write_images
from tests.tune.tiny import TINY, fake_sweep, tiny_data, tiny_options
from tests.uno.data.builders import failure
from tune import driver, report, spaces
from tune.driver import sweep_options
from tune.score import make_folds
from tune.sweep import TUNE, main
from uno.config import override
from uno.encoders.weights import PRETRAINED_FILE
from uno.errors import ConfigError, NumericsError
from uno.session.data import read_task


def test_options_are_its_own_and_those_of_a_run():
    words = "--space full --trials 5 --objective.epsilon 0.2 --score agreement"
    options = tiny_options("/x", *words.split(), "--workers", "3")
    assert (options.trials, options.score) == (5, "agreement")
    assert (options.space_name, options.concurrent) == ("full", 3)
    assert (
        options.config.objective.epsilon
        == options.overrides["objective.epsilon"]
        == 0.2
    )
    assert options.overrides["preset"] == "digits" and not any(
        key.startswith(("output", "compute")) for key in options.overrides
    )
    assert (options.grace_period(2), options.grace_period(18)) == (1, 3)


@pytest.mark.parametrize(
    ("words", "fact"),
    [
        ("--trial 3", "--trial"),
        ("--trials x", "--trials"),
        ("--trials 0", "--trials"),
        ("--space huge", "choose uno, full or give a .yaml file"),
        ("--search gird", "grid"),
        ("--score truth", "agreement"),
        ("--grace-epochs 0", "--grace-epochs"),
        ("--dry-run", "--dry-run"),
        ("--objective.epsilonn 1", "objective.epsilon"),
        ("3", "3"),
        ("--folds 0", "--folds"),
        ("--folds 9", "--folds 9"),
        ("--hide 1", "--hide 1"),
        ("--hide 5", "--hide 5"),
        ("--weights /some/run", "--weights"),
        ("--discover.epochs 0", "discover.epochs"),
        ("--train.batch-size 190", "does not fill one batch"),
        ("--data.known-classes first:2", "at least 3"),
        ("--score agreement --model.num-heads 1", "model.num_heads"),
        ("--score agreement --method rs", "model.num_heads"),
        ("--search optuna", "pip install optuna"),
    ],
)
def test_a_mistake_is_refused_before_an_image_is_decoded(
    tmp_path, monkeypatch, words, fact
):
    monkeypatch.setattr(driver, "find_spec", lambda name: None)  # no Optuna
    monkeypatch.setattr(driver, "load_data", lambda *_: pytest.fail("too late"))
    with pytest.raises(ConfigError, match=fact):
        main([*TINY, "--output", str(tmp_path / "s"), *words.split()])
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("words", "name"),
    [("--folds 1", "folds"), ("--objective.epsilon 0.3", r"objective\.epsilon")],
)
def test_a_sweep_with_other_settings_is_refused_by_name(tmp_path, words, name):
    fake_sweep(tmp_path, tiny_options(tmp_path), [])
    with pytest.raises(ConfigError, match=name):
        fake_sweep(tmp_path, tiny_options(tmp_path, *words.split()), [])


def test_a_sweep_continues_with_more_trials_unless_its_settings_are_damaged(tmp_path):
    fake_sweep(tmp_path, tiny_options(tmp_path), [])
    more = tiny_options(tmp_path, "--trials", "99", "--workers", "1")
    storage = fake_sweep(tmp_path, more, [])
    for content in (b"- damaged", b"", b"program: of another tool"):
        storage.write("sweep.yaml", content)
        with pytest.raises(ConfigError, match=r"sweep\.yaml"):
            fake_sweep(tmp_path, more, [])
        with pytest.raises(ConfigError, match=r"sweep\.yaml"):
            report.read(storage)


def test_a_sweep_of_failures_says_why(tmp_path):
    options = tiny_options(tmp_path / "s", "--folds", "1", "--trials", "1")
    fingerprint = read_task(options.config.data).rows.fingerprint
    failed = {
        "overrides": spaces.draw(options.space, 0, 1),
        "status": "failed",
        "reason": "not finite",
    }
    fake_sweep(tmp_path / "s", options, [failed], 2, fingerprint)
    with pytest.raises(
        NumericsError, match=r"every trial failed, .* first reason: not finite"
    ):
        driver.run_sweep(options)


@pytest.mark.parametrize(
    ("words", "epochs"), [("", 2), ("--max-steps 2", 1), ("--max-steps 1000", 2)]
)
def test_epochs_that_have_steps_to_take(tmp_path, words, epochs):
    options = tiny_options(tmp_path, *words.split())
    assert (
        driver.check_plans(
            options, make_folds(tiny_data(options.config), "folds", 2, 0)
        )
        == epochs
    )


@pytest.mark.parametrize(
    ("words", "cluster", "number"),
    [
        ("", {"CPU": 2.0}, 2),
        ("", {"CPU": 64.0}, 16),
        ("--workers 3", {"CPU": 64.0}, 3),
        ("--compute.cpus-per-worker 4", {"CPU": 10.0}, 2),
        ("--device cuda --gpus-per-worker 0.5", {"CPU": 16.0, "GPU": 2.0}, 4),
        ("--compute.cpus-per-worker 4", {"CPU": 1.0}, None),
        ("--device cuda", {"CPU": 1.0}, None),
    ],
)
def test_trials_at_a_time_are_what_the_cluster_holds(tmp_path, words, cluster, number):
    options = tiny_options(tmp_path, *words.split())
    ray = Mock(cluster_resources=lambda: cluster)
    with nullcontext() if number else pytest.raises(ConfigError, match="lower"):
        request = ray_env.task_request(options.config, cluster)
        assert driver.trials_at_once(options, request, ray) == number


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("127.0.0.1:1", "RAY_ADDRESS=local starts one on this machine"),
        ("http://127.0.0.1:8265", "RAY_ADDRESS=HOST:6379, or submit"),
        ("ray://host:10001", "HOST:6379 on a node"),
    ],
)
def test_a_stale_cluster_address_is_one_line(address, says):
    assert says in failure(ray_env.check_address, address)


@pytest.mark.parametrize("address", ["", "auto", "local"])
def test_an_address_that_ray_understands_is_left_to_ray(address):
    ray_env.check_address(address)


def test_own_images_decide_for_a_sweep_as_for_a_run(tmp_path, monkeypatch):
    """Kills: a sweep at 32 px, rungs of other epochs, a batch that no fold fills."""
    source = write_images(tmp_path / "in", dict.fromkeys("abcd", 16), size=12)
    words = [
        "--data",
        f"folder:{source}",
        "--known-classes",
        "a,b,c",
        "--model.encoder",
        "resnet_small",
    ]
    monkeypatch.setattr("uno.session.derive.EPOCHS", {"pretrain": 6, "discover": 18})
    options = sweep_options(
        parse([*words, "--output", str(tmp_path / "s"), "--device", "cpu"], TUNE)
    )
    found, task = driver.open_sweep_data(options)
    assert found.config.augment.large.size == found.overrides["data.stored_size"] == 12
    assert found.config.discover.epochs == 18
    folds = make_folds(driver.load_data(found, task, None), "folds", 2, 0)
    large = found._replace(config=override(found.config, {"train.batch_size": 500}))
    fitted = driver.with_fitting_batch(large, folds)
    batch_size = fitted.config.train.batch_size
    assert fitted.overrides["train.batch_size"] == batch_size <= sum(folds[0].sizes)
    assert driver.check_plans(fitted, folds) == 18


@pytest.mark.parametrize(
    ("score", "words", "setting"),
    [
        ("agreement", "--labeled {known} --unlabeled {more}", "gcd"),
        ("agreement", "--labeled {known} --unlabeled {more} --data.setting ncd", "ncd"),
        ("agreement", "--data folder:{known} --known-classes a,b,c", "ncd"),
        ("folds", "--labeled {known} --unlabeled {more}", "auto"),
    ],
)
def test_trials_solve_the_problem_of_a_run(tmp_path, capsys, score, words, setting):
    """Kills: trials that force images of known classes into new ones."""
    known = write_images(tmp_path / "known", dict.fromkeys("abcd", 16), size=12)
    more = write_images(tmp_path / "more", {"x": 32}, size=12)
    words = f"{words.format(known=known, more=more)} --score {score}"
    words += " --num-novel 1 --model.encoder resnet_small --device cpu"
    words += f" --output {tmp_path / 's'}"
    found, _ = driver.open_sweep_data(sweep_options(parse(words.split(), TUNE)))
    assert found.config.data.setting == setting
    if score == "agreement":
        assert f"setting: {setting.upper()}" in capsys.readouterr().out


def test_trials_of_a_sweep_on_an_object_store_find_its_pretrained_weights(monkeypatch):
    """Kills: a path in a bucket that trials look for in their own directory."""
    run_missing = Mock(side_effect=InterruptedError)
    monkeypatch.setattr(driver, "_run_missing", run_missing)
    monkeypatch.setattr(driver, "starting_weights", lambda *_: b"weights")
    with pytest.raises(InterruptedError):
        driver.run_sweep(tiny_options("mock:///sweep"))
    options = run_missing.call_args.args[0]
    assert options.config.model.weights == f"mock:///sweep/{PRETRAINED_FILE}"


def test_a_sweep_with_pretrained_weights_continues_where_it_was_moved(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(driver, "_run_missing", Mock(side_effect=InterruptedError))
    monkeypatch.setattr(driver, "starting_weights", lambda *_: b"weights")
    with pytest.raises(InterruptedError):
        driver.run_sweep(tiny_options(tmp_path / "sweep"))
    (tmp_path / "sweep").rename(tmp_path / "moved")
    with pytest.raises(InterruptedError):
        driver.run_sweep(tiny_options(tmp_path / "moved"))
