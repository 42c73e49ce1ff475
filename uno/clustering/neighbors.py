"""Find nearest neighbors by cosine, smooth rows by them, and compare clusters by them.

:func:`find_neighbors` finds the ``neighbors`` (N, k) of unit rows ``points`` (N, D),
and the other functions use them. Similarities are computed in blocks, so that the N x N
matrix is never in memory.
"""

import warnings

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

NUM_NEIGHBORS = 10
MAX_DENSE = 400  # rows for which the graph is a dense matrix
MAX_CELLS = 2**24  # similarities in memory at a time: 64 MB in float32


def find_neighbors(points: Tensor, num: int = NUM_NEIGHBORS) -> Tensor:
    """Find the nearest neighbors of each row by cosine, exactly.

    20,000 rows of 256 numbers take 6 s on two cores.

    Args:
        points: Rows (N, D), which must have length one already.
        num: Number of neighbors k; at most N - 1 are found.

    Returns:
        Indices int64 (N, min(k, N - 1)) of the neighbors, the nearest first. A row is
        not a neighbor of itself.
    """
    neighbors, block_rows = [], max(1, MAX_CELLS // max(1, len(points)))
    for start in range(0, len(points), block_rows):
        similarity = points[start : start + block_rows] @ points.T
        similarity.diagonal(start).fill_(-torch.inf)
        neighbors.append(similarity.topk(min(num, len(points) - 1), dim=1).indices)
    return torch.cat(neighbors)


def smooth_rows(points: Tensor, neighbors: Tensor) -> Tensor:
    """Replace each row by the mean of itself and its nearest neighbors.

    Args:
        points: Unit rows (N, D).
        neighbors: Indices of the neighbors of each row, int64 (N, k).

    Returns:
        The means (N, D), scaled to length one.
    """
    total = points.clone()
    for column in neighbors.unbind(1):
        total += points[column]
    return F.normalize(total, dim=1)


def count_links(neighbors: Tensor, clusters: Tensor, num_clusters: int) -> Tensor:
    """Count the nearest neighbors that the rows of each cluster have in each cluster.

    Args:
        neighbors: Indices of the k nearest neighbors of each row, int64 (N, k).
        clusters: The cluster of each row, int64 (N,), 0 to K - 1.
        num_clusters: Number of clusters K.

    Returns:
        int64 (K, K). The entry (a, b) counts, over the rows of cluster a, their
        neighbors in cluster b. On the diagonal it counts those in the same cluster.
    """
    pairs = clusters[:, None] * num_clusters + clusters[neighbors]
    counts = pairs.flatten().bincount(minlength=num_clusters * num_clusters)
    return counts.unflatten(0, (num_clusters, num_clusters))


def compute_mixing(links: Tensor, sizes: Tensor) -> Tensor:
    """Measure how much each pair of clusters mixes, by nearest neighbors.

    The mixing of two clusters is the number of nearest neighbors that their rows have
    in the other one, divided by the number that is expected if the rows of both were
    divided at random. It is 0 for clusters without a neighbor in each other, and about
    1 for two random parts of one cluster.

    Args:
        links: At (a, b) the number of nearest neighbors of the rows of cluster a that
            are in cluster b, (K, K), of :func:`count_links`.
        sizes: Number of rows of each cluster, (K,).

    Returns:
        The mixing of each pair, float64 (K, K), symmetric. It is 0 on the diagonal and
        where one of the clusters has fewer than two rows.
    """
    rows = [mixing_of_cluster(links, sizes, cluster) for cluster in range(len(sizes))]
    return torch.stack(rows)


def mixing_of_cluster(links: Tensor, sizes: Tensor, cluster: int) -> Tensor:
    """Measure how much one cluster mixes with each cluster, by nearest neighbors.

    The mixing of two clusters is the number of nearest neighbors that their rows have
    in the other one, divided by the number that is expected if the rows of both were
    divided at random.

    Args:
        links: At (a, b) the number of nearest neighbors of the rows of cluster a that
            are in cluster b, (K, K), of :func:`count_links`.
        sizes: Number of rows of each cluster, (K,).
        cluster: The cluster, an index from 0.

    Returns:
        Mixings float64 (K,), a row of :func:`compute_mixing`. They are 0 for the
        cluster itself and where one of the two has fewer than two rows.
    """
    there, back = links[cluster].double(), links[:, cluster].double()
    within, size, sizes = links.diagonal().double(), sizes[cluster], sizes.double()
    total = (size + sizes).clamp(min=1)
    expected = (within[cluster] + there) * sizes / total  # links there, at random
    expected += (within + back) * size / total
    mixed = (there + back) / expected.clamp(min=1e-12)
    mixed = mixed * ((sizes >= 2) & (size >= 2))
    mixed[cluster] = 0
    return mixed


def spectral_coordinates(neighbors: Tensor, num_coordinates: int) -> Tensor:
    """Compute the spectral embedding of rows by the graph of their nearest neighbors.

    k-means of these coordinates is spectral clustering (Ng, Jordan and Weiss, 2001).
    The graph is made symmetric. With more than 400 (``MAX_DENSE``) and more than 5 K
    rows the eigenvectors are approximate; the solver's start is the same in every call.

    Args:
        neighbors: Indices of the k nearest neighbors of each row, int64 (N, k).
        num_coordinates: Number K of leading eigenvectors of the symmetric normalized
            adjacency matrix, at most N.

    Returns:
        The values of the K eigenvectors for each row, float32 (N, K). Each row is
        scaled to length one.
    """
    from scipy.sparse import coo_matrix, diags
    from scipy.sparse.linalg import lobpcg

    size = len(neighbors)
    row = np.repeat(np.arange(size), neighbors.shape[1])
    edges = (row, neighbors.numpy().ravel())
    graph = coo_matrix((np.ones(len(row)), edges), (size, size)).tocsr()
    graph = (graph + graph.T) / 2
    scale = diags(1 / np.sqrt(np.asarray(graph.sum(axis=1)).ravel()))
    matrix = scale @ graph @ scale
    if size <= max(MAX_DENSE, 5 * num_coordinates):  # too few rows for lobpcg
        vectors = np.linalg.eigh(matrix.toarray())[1][:, -num_coordinates:]
    else:
        first = np.random.default_rng(0).standard_normal((size, num_coordinates))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # low precision is enough
            _, vectors = lobpcg(matrix, first, largest=True, tol=1e-3, maxiter=100)
    return F.normalize(torch.from_numpy(np.ascontiguousarray(vectors)).float(), dim=1)
