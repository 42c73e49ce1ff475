"""The tests are tested: mistakes this field made are put into the source, and a named test must fail.

A mutant replaces one piece of text, which must occur exactly once, in a copy of a module; what the copy
defines takes the place of the original in every loaded module, and the test runs against it.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest


class Mutant(NamedTuple):
    """A mistake and the test that sees it."""

    module: str
    original: str
    mutated: str
    test: str  # module:function, below tests.uno
    arguments: dict = {}  # noqa: RUF012


NAIVE = "test_objective:test_equals_naive_loop"
TWO_VIEWS = {"views": "two views", "aggregation": "swap", "hard": False, "concat": True}
CLUSTERS_STEP = "        scores = scores.log_softmax(dim=over_rows)  # every cluster gets the same mass\n"
ROWS_STEP = "        scores = scores.log_softmax(dim=over_clusters)  # every row gets mass one\n"

MUTANTS = {
    "softmax for Sinkhorn": Mutant(
        "uno.sinkhorn", CLUSTERS_STEP, "",
        "test_sinkhorn:test_clusters_are_used_equally_where_softmax_collapses",
    ),
    "rows normalised before clusters": Mutant(
        "uno.sinkhorn", CLUSTERS_STEP + ROWS_STEP, ROWS_STEP + CLUSTERS_STEP,
        "test_sinkhorn:test_degenerate_logits", {"case": "starved", "epsilon": 0.05},
    ),
    "per-sample maximum subtracted": Mutant(
        "uno.sinkhorn", "torch.float32)) / epsilon\n",
        "torch.float32)) / epsilon\n    scores = scores - scores.amax(dim=-1, keepdim=True)\n",
        "test_sinkhorn:test_global_shift_is_exact_but_a_shift_per_sample_is_not",
    ),
    "gradients through targets": Mutant(
        "uno.sinkhorn", "logits.detach()", "logits", "test_sinkhorn:test_no_gradient"
    ),
    "a view teaches itself as well": Mutant(
        "uno.objective", ".fill_diagonal_(", ".clamp_min_(", "test_objective:test_a_view_never_teaches_itself"
    ),
    "unswapped views": Mutant(
        "uno.objective", "known.new_ones(len(targets[0]), num_views).fill_diagonal_(",
        "torch.eye(len(targets[0]), num_views, dtype=known.dtype).add_(", NAIVE, TWO_VIEWS,
    ),
    "temperature missing": Mutant(
        "uno.objective", "scaled = logits.mT / temperature", "scaled = logits.mT",
        NAIVE, TWO_VIEWS,
    ),
    "softmax over the batch axis": Mutant(
        "uno.objective", "log_p = logits.log_softmax(dim=-2)", "log_p = logits.log_softmax(dim=-1)",
        NAIVE, TWO_VIEWS,
    ),
    "pretraining's softmax over the batch axis": Mutant(
        "uno.objective",
        "F.cross_entropy(_at_least_float32(known).flatten(0, 1) / temperature,",
        "F.nll_loss((_at_least_float32(known).flatten(0, 1) / temperature).log_softmax(dim=0),",
        "test_objective:test_pretraining_loss_is_cross_entropy_of_cosines",
    ),
    "pseudo-labels on the known block": Mutant(
        "uno.objective", "(t * n[..., unlabeled])",
        "(t[:, :, : known.shape[1]] * known[:, None, : t.shape[2], unlabeled])", NAIVE, TWO_VIEWS,
    ),
    "a gradient that leaves the targets out": Mutant(
        "uno.objective", "weight[f, :, None, None], value=-1", "weight[f, :, None, None], value=0",
        "test_objective:test_gradients_equal_autograd_through_the_padded_form",
        {"views": "two views", "concat": True},
    ),
    "a gradient of unit vectors along themselves": Mutant(
        "uno.heads", "along, value=-1)", "along, value=0)",
        "test_heads:test_stacked_heads_equal_separate_heads_in_train_mode",
        {"mlp_input": "raw", "num_views": 1},
    ),
    "heads mixed by the reshape": Mutant(
        "uno.heads", "hidden.unflatten(1, (self.num_heads, -1)).transpose(0, 1)",
        "hidden.unflatten(1, (-1, self.num_heads)).permute(2, 0, 1)",
        "test_heads:test_stacked_heads_equal_separate_heads_in_train_mode",
        {"mlp_input": "raw", "num_views": 1},
    ),
    "overclustering heads read the cluster heads' projections": Mutant(
        "uno.model", "projections.split(self.num_heads)", "[projections[: self.num_heads]] * 2",
        "test_heads:test_stacked_heads_equal_separate_heads_in_train_mode",
        {"mlp_input": "raw", "num_views": 1},
    ),
    "targets from small crops": Mutant(
        "uno.steps", "part.detach()[:num_large,", "part.detach()[-num_large:,",
        "test_steps:test_targets_come_from_the_unlabeled_rows_of_large_views",
    ),
    "prototypes not normalised in training": Mutant(
        "uno.steps", "    state.model.normalize_prototypes_()\n", "",
        "test_steps:test_prototypes_are_normalised_before_the_forward",
    ),
    "non-finite steps taken": Mutant(
        "uno.steps", "state.optimizer.found_inf = broken", "state.optimizer.found_inf = 0 * broken",
        "test_steps:test_a_step_with_a_non_finite_gradient_is_skipped",
        {"good_steps": 0, "value": float("nan")},
    ),
    "a counter left out of the checkpoint": Mutant(
        "uno.state", '"head_losses", "line_loss", ', '"head_losses", ',
        "test_state:test_every_tensor_of_model_and_optimizer_is_stored",
    ),
    "head tracker never reset": Mutant(
        "uno.train", "    state.epoch_losses.zero_()\n", "",
        "test_train:test_best_head_has_the_lowest_loss_over_the_last_epoch", {"storage": "tmp"},
    ),
    "prototypes not normalised at evaluation": Mutant(
        "uno.runs.run", "    model.normalize_prototypes_()\n    return model.eval(), int(",
        "    return model.eval(), int(",
        "runs.test_run:test_prototypes_are_normalised_before_evaluation", {"tmp_path": "tmp"},
    ),
    "known and novel blocks exchanged": Mutant(
        "uno.results.evaluate", "num_known + novel_output, known_output)",
        "novel_output, num_clusters + known_output)",
        "results.test_evaluate:test_counts_equal_a_loop_over_rows",
    ),
    "Hungarian per shard": Mutant(
        "uno.results.metrics",
        "    return float(matched_counts(counts, hungarian(counts)).sum() / _num_rows(counts))\n",
        "    cells = np.repeat(np.arange(counts.size), counts.ravel())\n"
        "    shards = np.array_split(np.random.default_rng(0).permutation(cells), 8)\n"
        "    parts = [np.bincount(r, minlength=counts.size).reshape(counts.shape) for r in shards]\n"
        "    return float(np.mean([matched_counts(p, hungarian(p)).sum() / p.sum() for p in parts]))\n",
        "results.test_metrics:test_matching_per_shard_inflates_and_merged_counts_do_not",
    ),
    "strict counted as official": Mutant(
        "uno.results.metrics",
        "matched_counts(found, hungarian(found))",
        "matched_counts(novel, hungarian(novel))",
        "results.test_metrics:test_absorbed_novel_classes_tell_official_from_strict",
    ),
    "one permutation for every epoch": Mutant(
        "uno.data.plan", "default_rng([seed, stream, epoch, c])", "default_rng([seed, stream, c])",
        "data.test_plan:test_order_is_a_pure_function_of_seed_and_epoch",
    ),
    "one common top feature is enough": Mutant(
        "uno.methods.rs", "> top - 0.5", "> 0.5",
        "methods.test_rs:test_same_top_features_equals_sorting", {"top": 2},
    ),
    "pseudo-labels of the joint head counted from zero": Mutant(
        "uno.methods.rs_plus", "num_known + clusters.argmax", "clusters.argmax",
        "methods.test_rs_plus:test_the_step_equals_the_loop",
    ),
    "targets that ignore the clusters' sizes": Mutant(
        "uno.methods.dtc", "q.square() / q.sum(dim=0)", "q.square()",
        "methods.test_dtc:test_sharpened_of_known_cases",
    ),
    "features of the similarity network not detached": Mutant(
        "uno.methods.pairs", "similarity(features[0].detach(), others)", "similarity(features[0], others)",
        "methods.test_mcl:test_the_similarity_network_learns_without_moving_the_encoder",
    ),
    "IIC pulls together": Mutant(
        "uno.regularizers", "return -(own - cross)", "return (own - cross)",
        "test_regularizers:test_iic_equals_the_loop_over_pairs",
    ),
    "an unfilled queue in Sinkhorn": Mutant(
        "uno.steps", "state.step < state.warmup_steps or state.step * rows.shape[2] < queue.shape[2]",
        "state.step < state.warmup_steps",
        "test_regularizers:test_the_queue_takes_part_when_it_is_full_and_warm_up_is_over",
        {"warmup_steps": 0, "first": 2, "overcluster_factor": 2},
    ),
    "a queue that takes part in the warm-up": Mutant(
        "uno.steps", "state.step < state.warmup_steps or state.step *", "state.step *",
        "test_regularizers:test_the_queue_takes_part_when_it_is_full_and_warm_up_is_over",
        {"warmup_steps": 3, "first": 3, "overcluster_factor": 2},
    ),
    "all views turned the same way": Mutant(
        "uno.data.resident", "torch.rot90(views[k % num_large], k, (2, 3))",
        "torch.rot90(views[k % num_large], 0, (2, 3))",
        "test_rotation:test_view_k_is_turned_k_times_and_all_rows_take_part",
    ),
    "warm-up divided by its steps less one": Mutant(
        "uno.schedule", "* step / warmup_steps", "* step / max(1, warmup_steps - 1)",
        "test_schedule:test_end_points_are_exact", {"warmup_steps": 10},
    ),
}  # fmt: skip


def apply(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the mutated definitions in the place of the original ones, wherever they are known by name."""
    module = importlib.import_module(mutant.module)
    source = Path(str(module.__file__)).read_text()
    assert source.count(mutant.original) == 1, f"{source.count(mutant.original)} places to mutate"
    copy = ModuleType(module.__name__)
    exec(compile(source.replace(mutant.original, mutant.mutated), str(module.__file__), "exec"), vars(copy))
    replaced = {
        id(vars(module)[name]): value
        for name, value in vars(copy).items()
        if getattr(value, "__module__", None) == module.__name__ and name in vars(module)
    }
    assert replaced
    for name, loaded in list(sys.modules.items()):
        if name.partition(".")[0] in ("uno", "tests"):
            for attribute, value in list(vars(loaded).items()):
                if id(value) in replaced:
                    monkeypatch.setattr(loaded, attribute, replaced[id(value)])


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(name, tmp_path, monkeypatch, one_thread):
    """The named test passes on the source as it is (it runs in this lane) and fails on the mutant."""
    from uno.data.files import Storage

    mutant = MUTANTS[name]
    module, function = mutant.test.split(":")
    test = getattr(importlib.import_module(f"tests.uno.{module}"), function)
    places = {"storage": Storage(str(tmp_path / "run")), "tmp_path": tmp_path}
    arguments = {k: places[k] if v == "tmp" else v for k, v in mutant.arguments.items()}
    apply(mutant, monkeypatch)
    with pytest.raises(AssertionError) as caught:
        test(**arguments)
    assert caught.traceback[1].name == function


def test_a_copy_without_a_change_passes(tmp_path, monkeypatch, one_thread):
    """The machinery itself breaks nothing: a mutant that changes a comment is not caught."""
    for name in ("uno.objective", "uno.sinkhorn", "uno.results.metrics", "uno.steps"):
        harmless = Mutant(
            name, "from __future__ import annotations\n", "from __future__ import annotations  #\n", ""
        )
        apply(harmless, monkeypatch)
    from tests.uno import test_objective, test_steps
    from tests.uno.results import test_metrics

    test_objective.test_equals_naive_loop(**TWO_VIEWS)
    test_metrics.test_absorbed_novel_classes_tell_official_from_strict()
    test_steps.test_targets_come_from_the_unlabeled_rows_of_large_views()
