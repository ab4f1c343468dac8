"""The kernels for groups of rows agree with `ragged_dot`, gradients included, at sizes that fit no tile."""

import jax
import jax.numpy as jnp
import numpy as np

from rpg_jax.models.moe import grouped_product


def test_the_kernels_agree_with_ragged_dot():
    sizes, rows = [5, 0, 130, 17], 160
    rng = np.random.default_rng(0)
    shapes = (rows, 24), (len(sizes), 24, 40), (rows, 40)
    x, w, weight = (jnp.asarray(rng.standard_normal(shape, np.float32)) for shape in shapes)
    sizes = jnp.array(sizes)

    def result(megablox):
        def loss(x, w):
            out = grouped_product(x, w, sizes, megablox=megablox)
            return (out * weight).sum(), out

        return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(x, w)

    ours, expected = result(True), result(False)
    # sums of 24 to 130 products of order 1 in f32, in another order
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4, rtol=1e-5), ours, expected)
    assert not np.any(ours[0][1][sizes.sum() :]), "rows past the groups"
