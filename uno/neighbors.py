"""Nearest neighbors of rows (N, D) by cosine, and what a partition may start from: neighbor means, spectral
coordinates. Similarities are held in blocks, never N x N.
"""

import warnings

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

NEIGHBORS = 10
MAX_DENSE = 400  # rows whose graph is a dense matrix
MAX_CELLS = 2**24  # similarities held at a time: 64 MB in float32


def nearest(points: Tensor, num: int = NEIGHBORS) -> Tensor:
    """Rows int64 (N, k) with the largest cosine to each unit row (N, D), itself left out; k is at most N - 1.
    Exact: 20,000 rows of 256 numbers take 6 s on two cores.
    """
    found, block = [], max(1, MAX_CELLS // len(points))
    for start in range(0, len(points), block):
        similarity = points[start : start + block] @ points.T
        similarity.diagonal(start).fill_(-torch.inf)
        found.append(similarity.topk(min(num, len(points) - 1), dim=1).indices)
    return torch.cat(found)


def smoothed(points: Tensor) -> Tensor:
    """Unit rows (N, D) -> the direction of the mean of each and its neighbors."""
    neighbors, total = nearest(points), points.clone()
    for column in neighbors.unbind(1):
        total += points[column]
    return F.normalize(total, dim=1)


def links(points: Tensor, clusters: Tensor, num: int) -> Tensor:
    """Nearest neighbors of a cluster's rows in another, int64 (K, K); unit rows (N, D), clusters (N,)."""
    pairs = clusters[:, None] * num + clusters[nearest(points)]
    return pairs.flatten().bincount(minlength=num * num).unflatten(0, (num, num))


def mixing(counts: Tensor, sizes: Tensor) -> Tensor:
    """The :func:`links` (K, K) between two clusters of ``sizes`` (K,) relative to those that they would have
    if nothing divided them, (K, K): 0 for none, about 1 for a cluster divided at random. 0 on the diagonal
    and where a cluster has fewer than two rows.
    """
    between, sizes = counts.double(), sizes.double()
    either = between.diagonal()[:, None] + between  # links of a cluster's rows to itself or the other one
    expected = either * sizes / (sizes[:, None] + sizes).clamp(min=1)
    found = (between + between.T) / (expected + expected.T).clamp(min=1e-12)
    some = sizes >= 2
    return (found * some * some[:, None]).fill_diagonal_(0)


def spectral(points: Tensor, num_coordinates: int) -> Tensor:
    """Unit rows (N, D) -> (N, K) of length one: the leading eigenvectors of the symmetric normalized neighbor
    graph, by row (Ng, Jordan and Weiss, NeurIPS 2001). K is at most N.
    """
    from scipy.sparse import coo_matrix, diags
    from scipy.sparse.linalg import lobpcg

    neighbors, size = nearest(points).numpy(), len(points)
    row = np.repeat(np.arange(size), neighbors.shape[1])
    graph = coo_matrix((np.ones(len(row)), (row, neighbors.ravel())), (size, size)).tocsr()
    graph = (graph + graph.T) / 2
    scale = diags(1 / np.sqrt(np.asarray(graph.sum(axis=1)).ravel()))
    matrix = scale @ graph @ scale
    if size <= max(MAX_DENSE, 5 * num_coordinates):  # of which lobpcg makes no block
        vectors = np.linalg.eigh(matrix.toarray())[1][:, -num_coordinates:]
    else:
        first = np.random.default_rng(0).standard_normal((size, num_coordinates))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the last digits need not be right
            _, vectors = lobpcg(matrix, first, largest=True, tol=1e-3, maxiter=100)
    return F.normalize(torch.from_numpy(np.ascontiguousarray(vectors)).float(), dim=1)
