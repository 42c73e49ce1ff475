"""The tests are tested: mistakes this field made take a function's place, and a
named test must fail.
"""

import importlib
import inspect
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.uno.reference import padded_loss
from uno.data.files import Storage
from uno.results import metrics

SINKHORN, LOSS, PAST = (
    "uno.objective:sinkhorn",
    "uno.objective:discovery_loss",
    "uno.methods.extensions:past_logits",
)
NORMALIZE = "uno.model:UnoModel.normalize_prototypes_"
NAIVE = "test_objective:test_equals_naive_loop"
TWO_VIEWS = {"views": "two views", "aggregation": "swap", "hard": False, "concat": True}
STACKED = "test_heads:test_stacked_heads_equal_separate_heads_in_train_mode"
RAW = {"mlp_input": "raw", "num_views": 1}
QUEUE = "methods.test_extensions:test_the_queue_takes_part_when_it_is_full_and_warm_up_is_over"  # noqa: E501
MUTANTS: dict[str, tuple[str, Callable, str, dict]] = {}


def mutant(target: str, test: str, **arguments: Any):
    """A mistake ``(original, *arguments)`` in the place of ``target``, module:name,
    that ``test`` sees.
    """

    def note(function: Callable) -> Callable:
        MUTANTS[function.__name__] = target, function, test, arguments
        return function

    return note


def also(
    name: str, target: str, function: Callable, test: str, **arguments: Any
) -> None:
    """As :func:`mutant`."""
    MUTANTS[name] = target, function, test, arguments


def scaled(
    original,
    logits,
    epsilon,
    num_iters,
    prior=None,
    order=(-2, -1),
    detach=True,
    prior_after=-2,
    times=1,
):
    """Sinkhorn-Knopp that normalizes along the dimensions of ``order``, first to last;
    the prior comes after that along ``prior_after``, ``times`` over.
    """
    scores = (logits.detach() if detach else logits) / epsilon
    for dim in order * num_iters:
        scores = scores.log_softmax(dim=dim)
        if prior is not None and dim == prior_after:
            scores = scores + times * prior.to(scores.dtype).log()
    return scores.exp()


def padded(original, *args, mistake=None):
    """The loss as the paper writes it, with a mistake."""
    return padded_loss(*args, mistake=mistake)


def replaced(original, *args, values=None, **kwargs):
    """The original called with some arguments replaced: functions of them, or
    attributes of ``state``.
    """
    bound = inspect.signature(original).bind(*args, **kwargs)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (values or {}).items():
            if callable(value):
                bound.arguments[name] = value(bound.arguments[name])
            else:
                patch.setattr(bound.arguments["state"], name, value)
        return original(*bound.args, **bound.kwargs)


@mutant("uno.model:UnoModel.heads", STACKED, **RAW)
def overclustering_heads_read_the_cluster_heads_projections(
    original, self, features, num_views=1
):
    project, half = self.projector.forward, self.num_heads
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            self.projector, "forward", lambda x: torch.cat([project(x)[:half]] * 2)
        )
        return original(self, features, num_views)


@mutant("uno.heads:StackedProjector.forward", STACKED, **RAW)
def heads_mixed_by_the_reshape(original, self, features):
    hidden = F.relu(self.bn(self.hidden(features)))
    hidden = hidden.unflatten(1, (-1, self.num_heads)).permute(2, 0, 1)
    return torch.baddbmm(self.bias, hidden, self.weight)


@mutant(
    "uno.train:_finish_epoch_",
    "test_train:test_best_head_has_the_lowest_loss_over_the_last_epoch",
    storage="tmp",
)
def head_tracker_never_reset(original, state):
    sums = state.epoch_losses.clone()
    original(state)
    state.epoch_losses.copy_(sums)


@mutant(
    "uno.results.evaluate:Confusions.add_",
    "results.test_evaluate:test_counts_equal_a_loop_over_rows",
)
def known_and_novel_blocks_exchanged(original, self, *args):
    before = self.joint.clone()
    original(self, *args)
    self.joint.copy_(before + (self.joint - before).roll(self.novel.shape[2], dims=-1))


@mutant(
    "uno.results.metrics:cluster_accuracy",
    "results.test_metrics:test_matching_per_shard_inflates_and_merged_counts_do_not",
)
def hungarian_per_shard(original, counts):
    cells = np.repeat(np.arange(counts.size), counts.ravel())
    shards = np.array_split(np.random.default_rng(0).permutation(cells), 8)
    parts = [
        np.bincount(shard, minlength=counts.size).reshape(counts.shape)
        for shard in shards
    ]
    return float(np.mean([original(part) for part in parts]))


@mutant(
    "uno.results.metrics:task_agnostic_strict",
    "results.test_metrics:test_absorbed_novel_classes_tell_official_from_strict",
)
def strict_counted_as_official(original, *args):
    return metrics.task_agnostic_official(*args)


@mutant(
    "uno.methods.rs:same_top_features",
    "methods.test_rs:test_same_top_features_equals_sorting",
    top=2,
)
def one_common_top_feature_is_enough(original, features, others, top):
    a, b = (
        torch.zeros_like(rows).scatter_(1, rows.topk(top).indices, 1)
        for rows in (features, others)
    )
    return a @ b.T > 0.5


@mutant(
    "uno.methods.pairs:similarity_loss",
    "methods.test_mcl:test_the_similarity_network_learns_without_moving_the_encoder",
)
def features_of_the_similarity_network_not_detached(
    original, similarity, features, labels
):
    same = (labels[:, None] == labels[None]).float()
    return F.binary_cross_entropy_with_logits(
        similarity(features[0], features[1].detach()), same
    )


@mutant(
    "uno.methods.rs_plus:incremental_loss",
    "methods.test_rs:test_the_step_of_rs_plus_equals_the_loop",
)
def pseudo_labels_of_the_joint_head_counted_from_zero(
    original, joint, clusters, temperature
):
    labels = clusters.argmax(dim=-1)
    return F.cross_entropy(joint.flatten(0, 1) / temperature, labels.repeat(len(joint)))


@mutant(
    "uno.steps:labeled_loss",
    "test_objective:test_labeled_loss_is_cross_entropy_of_cosines",
)
def softmax_of_pretraining_over_the_batch_axis(original, known, labels, temperature):
    log_p = (known.flatten(0, 1) / temperature).log_softmax(dim=0)
    return F.nll_loss(log_p, labels.repeat(len(known)))


@mutant(
    "uno.schedule:warmup_cosine",
    "test_schedule:test_end_points_are_exact",
    warmup_steps=10,
)
def warm_up_divided_by_its_steps_less_one(
    original, step, total_steps, warmup_steps, base_lr, min_lr
):
    if step < warmup_steps:
        return min_lr + (base_lr - min_lr) * step / max(1, warmup_steps - 1)
    return original(step, total_steps, warmup_steps, base_lr, min_lr)


@mutant(
    "uno.methods.rotation:turned",
    "test_rotation:test_view_k_is_turned_k_times_and_all_rows_take_part",
)
def all_views_turned_the_same_way(original, batch):
    batch = original(batch)
    return batch._replace(views=batch.views[:1] * 4)


@mutant(NORMALIZE, "test_steps:test_prototypes_are_normalized_before_the_forward")
def prototypes_not_normalized_in_training(*args):
    return None


@mutant(
    NORMALIZE,
    "runs.test_run:test_prototypes_are_normalized_before_evaluation",
    tmp_path="tmp",
)
def prototypes_not_normalized_at_evaluation(*args):
    return None


@mutant(
    "torch.nn.utils:get_total_norm",
    "test_steps:test_a_step_with_a_non_finite_gradient_is_skipped",
    good_steps=0,
    value=float("nan"),
)
def non_finite_steps_taken(*args):
    return torch.zeros(())


@mutant("uno.methods.dtc:sharpened", "methods.test_dtc:test_q_and_p_equal_the_loops")
def targets_that_ignore_the_clusters_sizes(original, q):
    return F.normalize(q.square(), p=1, dim=1)


@mutant(
    "uno.state:state_tensors",
    "test_state:test_every_tensor_of_model_and_optimizer_is_stored",
)
def a_counter_left_out_of_the_checkpoint(original, state):
    return {
        name: tensor for name, tensor in original(state).items() if name != "skipped"
    }


@mutant(
    "uno.methods.extensions:iic_loss",
    "methods.test_extensions:test_iic_equals_the_loop_over_pairs",
)
def iic_pulls_together(original, *args):
    return -original(*args)


SIMGCD, SIMGCD_STEP = (
    "uno.methods.simgcd",
    "methods.test_simgcd:test_the_step_equals_the_loop",
)
ALL_ROWS = {"setting": "ncd", "rows": "all", "frozen": True}


@mutant(f"{SIMGCD}:distillation_loss", SIMGCD_STEP, **ALL_ROWS)
def a_view_that_distills_itself(original, joint, *rest):
    targets = joint.detach() / rest[-1]
    targets[:, rest[0] :, : rest[1]] = -torch.inf
    return -(targets.softmax(-1) * (joint / rest[2]).log_softmax(-1)).sum(-1).mean()


@mutant(f"{SIMGCD}:imbalance", "methods.test_simgcd:test_imbalance_of_known_cases")
def entropy_of_every_row_for_that_of_the_mean(original, logits):
    return torch.stack(
        [original(row[None, None]) for row in logits.flatten(0, 1)]
    ).mean()


@mutant(
    "uno.methods.pim:of_one_length",
    "methods.test_pim:test_rows_of_different_length_are_kept_as_cosines",
)
def prototypes_whose_length_is_lost(original, weights):
    return F.pad(F.normalize(weights, dim=1), (0, 1))


also(
    "targets of new rows at known outputs",
    f"{SIMGCD}:distillation_loss",
    partial(replaced, values={"barred": lambda barred: 0}),
    SIMGCD_STEP,
    **ALL_ROWS,
)
also(
    "one temperature of contrast for both",
    "uno.methods.simgcd:contrast_loss",
    partial(replaced, values={"temperature": lambda temperature: 1.0}),
    SIMGCD_STEP,
    setting="gcd",
    rows="all",
    frozen=False,
)
PIM = "methods.test_pim:test_the_objective_equals_the_loop"
also(
    "new rows that may be of known classes",
    "uno.methods.pim:objective",
    partial(replaced, values={"barred": lambda barred: 0}),
    PIM,
    supervised=True,
    barred=4,
)
also(
    "lambda chosen with the labels' loss",
    "uno.methods.pim:descend",
    partial(replaced, values={"supervised": lambda given: True}),
    "methods.test_pim:test_the_search_of_lambda_sees_no_label",
)
also(
    "softmax for Sinkhorn",
    SINKHORN,
    partial(scaled, order=(-1,)),
    "test_sinkhorn:test_clusters_are_used_equally_where_softmax_collapses",
)
also(
    "rows normalized before clusters",
    SINKHORN,
    partial(scaled, order=(-1, -2)),
    "test_sinkhorn:test_degenerate_logits",
    case="starved",
    epsilon=0.05,
)
also(
    "per-sample maximum subtracted",
    SINKHORN,
    partial(
        replaced,
        values={"logits": lambda logits: logits - logits.amax(dim=-1, keepdim=True)},
    ),
    "test_sinkhorn:test_global_shift_is_exact_but_a_shift_per_sample_is_not",
)
also(
    "gradients through targets",
    SINKHORN,
    partial(scaled, detach=False),
    "test_sinkhorn:test_no_gradient",
)
also(
    "a view teaches itself as well",
    LOSS,
    partial(padded, mistake="itself too"),
    "test_objective:test_a_view_never_teaches_itself",
)


def turned(prior):
    return None if prior is None else prior.flip(0)


PRIOR = "test_sinkhorn:test_a_prior_gives_clusters_their_own_mass"
also(
    "a prior that is ignored",
    SINKHORN,
    partial(scaled, times=0),
    PRIOR,
    num_rows=24,
    num_clusters=5,
)
also(
    "a prior after the rows",
    SINKHORN,
    partial(scaled, prior_after=-1),
    PRIOR,
    num_rows=24,
    num_clusters=5,
)
MIXED_STEP = "test_steps:test_unlabeled_rows_of_a_mixed_pile_choose_among_all_outputs"
also(
    "known outputs of another view",
    "uno.objective:global_targets",
    partial(replaced, values={"known": lambda known: known.flip(0)}),
    MIXED_STEP,
)
also(
    "a prior of the wrong outputs",
    "uno.objective:global_targets",
    partial(replaced, values={"prior": turned}),
    MIXED_STEP,
)
also(
    "targets of known outputs without a pull",
    LOSS,
    partial(replaced, values={"targets": lambda targets: [t * 0.5 for t in targets]}),
    "test_objective:test_a_mixed_pile_equals_the_naive_loop",
    views="two views",
)
for mistake in ("unswapped", "no temperature", "over rows", "known block"):
    also(f"loss: {mistake}", LOSS, partial(padded, mistake=mistake), NAIVE, **TWO_VIEWS)
also(
    "targets from small crops",
    "uno.objective:global_targets",
    partial(
        replaced,
        values={"families": lambda families: [family.flip(0) for family in families]},
    ),
    "test_steps:test_targets_come_from_the_unlabeled_rows_of_large_views",
)
also(
    "one permutation for every epoch",
    "uno.data.plan:epoch_indices",
    partial(replaced, values={"epoch": lambda epoch: 0}),
    "data.test_plan:test_order_is_a_pure_function_of_seed_and_epoch",
)
also(
    "an unfilled queue in Sinkhorn",
    PAST,
    partial(replaced, values={"step": 10**9}),
    QUEUE,
    warmup_steps=0,
    first=2,
    overcluster_factor=2,
)
also(
    "a queue that takes part in the warm-up",
    PAST,
    partial(replaced, values={"warmup_steps": 0}),
    QUEUE,
    warmup_steps=3,
    first=3,
    overcluster_factor=2,
)


def replace(
    target: str, mutated: Callable | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Put ``mutated`` in the place of ``target``, wherever a loaded module knows it
    by name.
    """
    module, _, name = target.partition(":")
    owner: Any = importlib.import_module(module)
    *classes, name = name.split(".")
    for each in classes:
        owner = getattr(owner, each)
    original = getattr(owner, name)

    def wrong(*args, **kwargs):
        return mutated(original, *args, **kwargs)

    monkeypatch.setattr(owner, name, wrong)
    for loaded_name, loaded in list(sys.modules.items()):
        if not classes and loaded_name.partition(".")[0] in ("uno", "tests"):
            for attribute, value in list(vars(loaded).items()):
                if value is original:
                    monkeypatch.setattr(loaded, attribute, wrong)


def run(test: str, arguments: dict, tmp_path) -> None:
    """Run a test function below tests.uno."""
    module, function = test.split(":")
    places = {"storage": Storage(str(tmp_path / "run")), "tmp_path": tmp_path}
    found = getattr(importlib.import_module(f"tests.uno.{module}"), function)
    found(
        **{
            key: places[key] if value == "tmp" else value
            for key, value in arguments.items()
        }
    )


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(name, tmp_path, monkeypatch):
    """The named test passes on the source as it is (it runs in this lane) and fails
    on the mutant.
    """
    target, mutated, test, arguments = MUTANTS[name]
    # it knows the original by name
    importlib.import_module(f"tests.uno.{test.partition(':')[0]}")
    replace(target, mutated, monkeypatch)
    with pytest.raises(AssertionError):
        run(test, arguments, tmp_path)


def test_replacing_breaks_nothing(tmp_path, monkeypatch):
    """The machinery and the slow forms without a mistake pass: what is caught is the
    mistake.
    """
    for target, form in (
        (SINKHORN, scaled),
        (LOSS, padded),
        ("uno.model:UnoModel.heads", replaced),
    ):
        replace(target, form, monkeypatch)
    for test, arguments in (
        (NAIVE, TWO_VIEWS),
        (STACKED, RAW),
        ("test_sinkhorn:test_no_gradient", {}),
    ):
        run(test, arguments, tmp_path)
    run("test_objective:test_a_view_never_teaches_itself", {}, tmp_path)
