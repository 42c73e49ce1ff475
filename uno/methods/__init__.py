"""Discovery methods under one protocol: an objective and its heads; all the rest is shared.

All share encoder, pretraining, batches and views (of which baselines use two large ones), SGD, schedule and
evaluation. Unless its module says otherwise, a baseline's novel head is one layer of cosines on the feature
over tau, where the papers have a linear layer with a bias: so known and novel outputs are comparable, and
predict, report and export serve every method. A new one is a module of this package with a ``METHOD``
(:class:`uno.methods.method.Method`) and its line in :data:`METHODS`.
"""

METHODS = {
    "uno": "unified objective (Fini et al., ICCV 2021)",
    "rs": "rank statistics (Han et al., ICLR 2020)",
    "rs_plus": "rank statistics with incremental learning (Han et al., ICLR 2020)",
    "mcl": "meta classification likelihood (Hsu et al., ICLR 2019)",
    "dtc": "deep transfer clustering (Han et al., ICCV 2019)",
    "kcl": "KLD-based contrastive loss (Hsu et al., ICLR 2018)",
    "ncl": "neighbourhood contrastive learning (Zhong et al., CVPR 2021)",
    "openmix": "OpenMix (Zhong et al., CVPR 2021)",
    "jia": "joint representation learning and discovery (Jia et al., ICCV 2021)",
}
"""Name, which is its module's too -> what it is."""
