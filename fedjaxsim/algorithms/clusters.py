"""Clients in public, fixed clusters: a server state per cluster, at the price of one for all."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from fedjaxsim.algorithm import Algorithm, WarmStart
from fedjaxsim.kernels import products

PyTree = Any
_PUBLIC = (
    "The clusters of the clients, whose sizes divide the releases, are taken as public; if they "
    "are made of data, the guarantee does not cover what they reveal."
)


def in_clusters(algorithm: Algorithm, clusters: ArrayLike) -> Algorithm:
    """Run the algorithm in each of g clusters: a client reads and moves its cluster's state alone.

    A message goes into its cluster's slot of g, which keeps its norm: one message, one clip and one
    release, with noise in every slot, at the price of the algorithm. A release is a sum divided by
    p·m; the server multiplies slot c by m/m_c, since p·m_c is the divisor of a cluster of m_c
    clients. The noise of that cluster is m/m_c times as large. (PMTL, remark on the generality of
    Corollary 2.) A message takes g times the memory.

    Args:
      algorithm: an algorithm with a server that takes a mean message.
      clusters: the cluster of each client, (m,) integers from 0 to g − 1, none of them empty.
        Public and fixed before the run, and named among the assumptions of a guarantee.

    Raises:
      ValueError: if clusters are not such integers; when the algorithm is first traced, if there is
        not one for each client.
    """
    ids = np.asarray(clusters)
    whole = ids.ndim == 1 and ids.size > 0 and ids.dtype.kind in "iu"
    if not whole or not np.array_equal(np.unique(ids), np.arange(ids.max() + 1)):
        raise ValueError(
            "clusters must be whole numbers (m,), from 0 to g − 1 and each of them taken, "
            f"got {clusters!r}"
        )
    sizes = np.bincount(ids)
    g, m, ids = len(sizes), len(ids), ids.astype(np.int32)

    def for_all(shared: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (g, *jnp.shape(leaf))), shared)

    def of_client(shared: PyTree, client_id: jax.Array) -> PyTree:
        return jax.tree.map(lambda leaf: leaf[jnp.asarray(ids)[client_id]], shared)

    def along_clusters(values: np.ndarray, leaf: jax.Array) -> jax.Array:
        return jnp.asarray(values.reshape(g, *(1,) * (leaf.ndim - 1)), leaf.dtype)

    @functools.wraps(algorithm.init)
    def init(key, *others):
        shared, personal = algorithm.init(key, *others)
        return for_all(shared), personal

    def client(shared, personal, data, hparams, context):
        if context.num_clients != m:
            raise ValueError(
                f"clusters must have a number for each of the {context.num_clients} clients, "
                f"got {m}"
            )
        own = of_client(shared, context.client_id)
        personal, message, metrics = algorithm.client(own, personal, data, hparams, context)

        def place(leaf):
            slots = jnp.zeros((g, *leaf.shape), leaf.dtype)
            return slots.at[jnp.asarray(ids)[context.client_id]].set(leaf)

        message = products.dense(products.unsealed(message))
        return personal, jax.tree.map(place, message), metrics

    def server(shared, release, hparams, round_):
        release = jax.tree.map(lambda leaf: leaf * along_clusters(m / sizes, leaf), release)
        step = jax.vmap(algorithm.server, in_axes=(0, 0, None, None))
        return step(shared, release, hparams, round_)

    def predict(shared, personal, hparams, client_id):
        return algorithm.predict(of_client(shared, client_id), personal, hparams, client_id)

    def predict_with_data(shared, personal, data, hparams, client_id):
        assert algorithm.predict_with_data is not None
        own = of_client(shared, client_id)
        return algorithm.predict_with_data(own, personal, data, hparams, client_id)

    warm = algorithm.warm_start

    def published(shared):
        params = jax.vmap(warm.published)(shared)
        return jax.tree.map(
            lambda leaf: jnp.sum(leaf * along_clusters(sizes / m, leaf), axis=0), params
        )

    def start(hparams, published, own):
        assert warm.start is not None
        shared, personal = warm.start(hparams, published, own)
        return for_all(shared), personal

    return algorithm._replace(
        averages_statistics=False,
        init=init,
        client=client,
        server=server,
        predict=predict,
        predict_with_data=None if algorithm.predict_with_data is None else predict_with_data,
        public=(*algorithm.public, _PUBLIC),
        warm_start=WarmStart(None if warm.start is None else start, published),
    )
