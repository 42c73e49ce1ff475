"""The tests are tested: mistakes this field made take a function's place, and a named test must fail."""

import importlib
import inspect
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.uno.reference import padded_loss


class Mutant(NamedTuple):
    """A mistake: ``make(original)`` takes the place of ``target``, and ``test`` sees it."""

    target: str  # module:name or module:class.name
    make: Callable[[Any], Any]
    test: str  # module:function, below tests.uno
    arguments: dict = {}  # noqa: RUF012


# ----------------------------------------------------------------------------------------------- the mistakes
def scaled(order: tuple[int, int], detach: bool = True):
    """Sinkhorn-Knopp that normalises along the dimensions of ``order``, first to last."""

    def sinkhorn(logits, epsilon, num_iters):
        scores = (logits.detach() if detach else logits) / epsilon
        for dim in order * num_iters:
            scores = scores.log_softmax(dim=dim)
        return scores.exp()

    return lambda original: sinkhorn


def padded(mistake: str | None):
    """The loss as the paper writes it, with a mistake."""
    return lambda original: partial(padded_loss, mistake=mistake)


def fields(**replaced):
    """A function called with some arguments replaced: by a function of them, or an attribute of ``state``."""

    def make(original):
        def call(*args, **kwargs):
            bound = inspect.signature(original).bind(*args, **kwargs)
            with pytest.MonkeyPatch.context() as patch:
                for name, value in replaced.items():
                    if callable(value):
                        bound.arguments[name] = value(bound.arguments[name])
                    else:
                        patch.setattr(bound.arguments["state"], name, value)
                return original(*bound.args, **bound.kwargs)

        return call

    return make


def cluster_heads_twice(heads):
    def mutant(self, features, num_views=1):
        project, half = self.projector.forward, self.num_heads
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.projector, "forward", lambda x: torch.cat([project(x)[:half]] * 2))
            return heads(self, features, num_views)

    return mutant


def mixed_heads(forward):
    def mutant(self, features):
        hidden = F.relu(self.bn(self.hidden(features)))
        hidden = hidden.unflatten(1, (-1, self.num_heads)).permute(2, 0, 1)
        return torch.baddbmm(self.bias, hidden, self.weight)

    return mutant


def kept_epoch(finish_epoch_):
    def mutant(state):
        sums = state.epoch_losses.clone()
        finish_epoch_(state)
        state.epoch_losses.copy_(sums)

    return mutant


def exchanged_blocks(update):
    def mutant(self, *args):
        before = self.joint.clone()
        update(self, *args)
        self.joint.copy_(before + (self.joint - before).roll(self.novel.shape[2], dims=-1))

    return mutant


def per_shard(cluster_accuracy):
    def mutant(counts):
        cells = np.repeat(np.arange(counts.size), counts.ravel())
        shards = np.array_split(np.random.default_rng(0).permutation(cells), 8)
        parts = [np.bincount(shard, minlength=counts.size).reshape(counts.shape) for shard in shards]
        return float(np.mean([cluster_accuracy(part) for part in parts]))

    return mutant


def official_for_strict(strict):
    from uno.results import metrics

    return metrics.task_agnostic_official


def one_common_feature(same_top_features):
    def top_set(rows, top):
        return torch.zeros_like(rows).scatter_(1, rows.topk(top, dim=1).indices, 1)

    return lambda features, others, top: top_set(features, top) @ top_set(others, top).T > 0.5


def undetached_pairs(similarity_loss):
    def mutant(similarity, features, labels):
        same = (labels[:, None] == labels[None]).float()
        return F.binary_cross_entropy_with_logits(similarity(features[0], features[1].detach()), same)

    return mutant


def labels_from_zero(incremental_loss):
    def mutant(joint, clusters, temperature):
        labels = clusters.argmax(dim=-1)
        return F.cross_entropy(joint.flatten(0, 1) / temperature, labels.repeat(len(joint)))

    return mutant


def softmax_over_batch(labeled_loss):
    def mutant(known, labels, temperature):
        log_p = (known.flatten(0, 1) / temperature).log_softmax(dim=0)
        return F.nll_loss(log_p, labels.repeat(len(known)))

    return mutant


def short_warmup(warmup_cosine):
    def mutant(step, total_steps, warmup_steps, base_lr, min_lr):
        if step < warmup_steps:
            return min_lr + (base_lr - min_lr) * step / max(1, warmup_steps - 1)
        return warmup_cosine(step, total_steps, warmup_steps, base_lr, min_lr)

    return mutant


def same_turn(batches):
    def mutant(self, step):
        batch = batches(self, step)
        return batch._replace(views=batch.views[:1] * 4)

    return mutant


def without(function):
    """A function that does nothing."""
    return lambda *args: None


NAIVE = "test_objective:test_equals_naive_loop"
TWO_VIEWS = {"views": "two views", "aggregation": "swap", "hard": False, "concat": True}
STACKED = "test_heads:test_stacked_heads_equal_separate_heads_in_train_mode"
RAW = {"mlp_input": "raw", "num_views": 1}
SINKHORN, LOSS = "uno.sinkhorn:sinkhorn", "uno.objective:discovery_loss"
QUEUE = "methods.test_extensions:test_the_queue_takes_part_when_it_is_full_and_warm_up_is_over"

MUTANTS = {
    "softmax for Sinkhorn": Mutant(
        SINKHORN, scaled((-1,)), "test_sinkhorn:test_clusters_are_used_equally_where_softmax_collapses"
    ),
    "rows normalised before clusters": Mutant(
        SINKHORN, scaled((-1, -2)), "test_sinkhorn:test_degenerate_logits",
        {"case": "starved", "epsilon": 0.05},
    ),
    "per-sample maximum subtracted": Mutant(
        SINKHORN, fields(logits=lambda logits: logits - logits.amax(dim=-1, keepdim=True)),
        "test_sinkhorn:test_global_shift_is_exact_but_a_shift_per_sample_is_not",
    ),
    "gradients through targets": Mutant(
        SINKHORN, scaled((-2, -1), detach=False), "test_sinkhorn:test_no_gradient"
    ),
    "a view teaches itself as well": Mutant(
        LOSS, padded("itself too"), "test_objective:test_a_view_never_teaches_itself"
    ),
    "unswapped views": Mutant(LOSS, padded("unswapped"), NAIVE, TWO_VIEWS),
    "temperature missing": Mutant(LOSS, padded("no temperature"), NAIVE, TWO_VIEWS),
    "softmax over the batch axis": Mutant(LOSS, padded("over rows"), NAIVE, TWO_VIEWS),
    "pseudo-labels on the known block": Mutant(LOSS, padded("known block"), NAIVE, TWO_VIEWS),
    "pretraining's softmax over the batch axis": Mutant(
        "uno.objective:labeled_loss", softmax_over_batch,
        "test_objective:test_labeled_loss_is_cross_entropy_of_cosines",
    ),
    "heads mixed by the reshape": Mutant("uno.heads:StackedProjector.forward", mixed_heads, STACKED, RAW),
    "overclustering heads read the cluster heads' projections": Mutant(
        "uno.model:UnoModel.heads", cluster_heads_twice, STACKED, RAW
    ),
    "targets from small crops": Mutant(
        "uno.steps:global_targets", fields(families=lambda families: [family.flip(0) for family in families]),
        "test_steps:test_targets_come_from_the_unlabeled_rows_of_large_views",
    ),
    "prototypes not normalised in training": Mutant(
        "uno.model:UnoModel.normalize_prototypes_", without,
        "test_steps:test_prototypes_are_normalised_before_the_forward",
    ),
    "prototypes not normalised at evaluation": Mutant(
        "uno.model:UnoModel.normalize_prototypes_", without,
        "runs.test_run:test_prototypes_are_normalised_before_evaluation", {"tmp_path": "tmp"},
    ),
    "non-finite steps taken": Mutant(
        "torch.nn.utils:get_total_norm", lambda original: lambda grads: torch.zeros(()),
        "test_steps:test_a_step_with_a_non_finite_gradient_is_skipped",
        {"good_steps": 0, "value": float("nan")},
    ),
    "a counter left out of the checkpoint": Mutant(
        "uno.state:COUNTERS", lambda names: names[:-1],
        "test_state:test_every_tensor_of_model_and_optimizer_is_stored",
    ),
    "head tracker never reset": Mutant(
        "uno.train:_finish_epoch_", kept_epoch,
        "test_train:test_best_head_has_the_lowest_loss_over_the_last_epoch", {"storage": "tmp"},
    ),
    "known and novel blocks exchanged": Mutant(
        "uno.results.evaluate:Confusions.add_", exchanged_blocks,
        "results.test_evaluate:test_counts_equal_a_loop_over_rows",
    ),
    "Hungarian per shard": Mutant(
        "uno.results.metrics:cluster_accuracy", per_shard,
        "results.test_metrics:test_matching_per_shard_inflates_and_merged_counts_do_not",
    ),
    "strict counted as official": Mutant(
        "uno.results.metrics:task_agnostic_strict", official_for_strict,
        "results.test_metrics:test_absorbed_novel_classes_tell_official_from_strict",
    ),
    "one permutation for every epoch": Mutant(
        "uno.data.plan:epoch_indices", fields(epoch=lambda epoch: 0),
        "data.test_plan:test_order_is_a_pure_function_of_seed_and_epoch",
    ),
    "one common top feature is enough": Mutant(
        "uno.methods.rs:same_top_features", one_common_feature,
        "methods.test_rs:test_same_top_features_equals_sorting", {"top": 2},
    ),
    "pseudo-labels of the joint head counted from zero": Mutant(
        "uno.methods.rs_plus:incremental_loss", labels_from_zero,
        "methods.test_rs_plus:test_the_step_equals_the_loop",
    ),
    "targets that ignore the clusters' sizes": Mutant(
        "uno.methods.dtc:sharpened", lambda original: lambda q: F.normalize(q.square(), p=1, dim=1),
        "methods.test_dtc:test_sharpened_of_known_cases",
    ),
    "features of the similarity network not detached": Mutant(
        "uno.methods.pairs:similarity_loss", undetached_pairs,
        "methods.test_mcl:test_the_similarity_network_learns_without_moving_the_encoder",
    ),
    "IIC pulls together": Mutant(
        "uno.methods.extensions:iic_loss", lambda original: lambda *args: -original(*args),
        "methods.test_extensions:test_iic_equals_the_loop_over_pairs",
    ),
    "an unfilled queue in Sinkhorn": Mutant(
        "uno.methods.extensions:past_logits", fields(step=10**9), QUEUE,
        {"warmup_steps": 0, "first": 2, "overcluster_factor": 2},
    ),
    "a queue that takes part in the warm-up": Mutant(
        "uno.methods.extensions:past_logits", fields(warmup_steps=0), QUEUE,
        {"warmup_steps": 3, "first": 3, "overcluster_factor": 2},
    ),
    "all views turned the same way": Mutant(
        "uno.data.resident:RotationBatches.__call__", same_turn,
        "test_rotation:test_view_k_is_turned_k_times_and_all_rows_take_part",
    ),
    "warm-up divided by its steps less one": Mutant(
        "uno.schedule:warmup_cosine", short_warmup, "test_schedule:test_end_points_are_exact",
        {"warmup_steps": 10},
    ),
}  # fmt: skip


# ------------------------------------------------------------------------------------------------ their tests
def replace(target: str, make: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Put ``make(original)`` in the place of ``target``, wherever a loaded module knows it by name."""
    module, _, name = target.partition(":")
    owner: Any = importlib.import_module(module)
    *classes, name = name.split(".")
    for each in classes:
        owner = getattr(owner, each)
    original = getattr(owner, name)
    mutant = make(original)
    monkeypatch.setattr(owner, name, mutant)
    for loaded_name, loaded in list(sys.modules.items()):
        if not classes and loaded_name.partition(".")[0] in ("uno", "tests"):
            for attribute, value in list(vars(loaded).items()):
                if value is original:
                    monkeypatch.setattr(loaded, attribute, mutant)


def run(test: str, arguments: dict, tmp_path) -> None:
    """Run a test function below tests.uno."""
    from uno.data.files import Storage

    module, function = test.split(":")
    places = {"storage": Storage(str(tmp_path / "run")), "tmp_path": tmp_path}
    found = getattr(importlib.import_module(f"tests.uno.{module}"), function)
    found(**{key: places[key] if value == "tmp" else value for key, value in arguments.items()})


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(name, tmp_path, monkeypatch, one_thread):
    """The named test passes on the source as it is (it runs in this lane) and fails on the mutant."""
    mutant = MUTANTS[name]
    importlib.import_module(f"tests.uno.{mutant.test.partition(':')[0]}")  # it knows the original by name
    replace(mutant.target, mutant.make, monkeypatch)
    with pytest.raises(AssertionError):
        run(mutant.test, mutant.arguments, tmp_path)


def test_replacing_breaks_nothing(tmp_path, monkeypatch, one_thread):
    """The machinery and the slow forms without a mistake pass: what is caught is the mistake."""
    replace(SINKHORN, scaled((-2, -1)), monkeypatch)
    replace(LOSS, padded(None), monkeypatch)
    replace("uno.model:UnoModel.heads", fields(), monkeypatch)
    for test, arguments in ((NAIVE, TWO_VIEWS), (STACKED, RAW), ("test_sinkhorn:test_no_gradient", {})):
        run(test, arguments, tmp_path)
    run("test_objective:test_a_view_never_teaches_itself", {}, tmp_path)
