"""The scores by which ``uno tune``, the hyperparameter search, compares its trials.

``SCORES`` maps the name of each score to the sentence that explains it to the user.
"""

FOLDS, AGREEMENT = "folds", "agreement"
SCORES = {
    FOLDS: (
        "known classes hidden in turn and rediscovered: harmonic mean of strict"
        " accuracy on the hidden classes and accuracy on held-out images of the known"
        " ones, each a mean over heads"
    ),
    AGREEMENT: (
        "mean clustering agreement of all pairs of heads on the unlabeled images (in"
        " the GCD setting those that a head finds new), no labels"
    ),
}
