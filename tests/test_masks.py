"""Masks by truth table: 1 = may attend. Rows are queries, columns keys."""

import jax.numpy as jnp
import numpy as np

from flaxformer_min.masks import causal_mask, padding_mask


def as_table(mask):
    assert mask.dtype == jnp.bool_
    return np.asarray(mask).astype(int).tolist()


def test_padding_mask_hides_only_the_pad_symbol():
    ids = jnp.array([[7, 2, 3, 0, 0], [1, 5, 1, 2, 3], [0, 4, 0, 9, 0]])  # 1 is unk: not padding
    assert as_table(padding_mask(ids)) == [
        [[[1, 1, 1, 0, 0]]],
        [[[1, 1, 1, 1, 1]]],
        [[[0, 1, 0, 1, 0]]],
    ]


def test_padding_mask_follows_the_given_pad_symbol():
    ids = jnp.array([[0, 4, 31, 31]])
    assert as_table(padding_mask(ids, pad_id=31)) == [[[[1, 1, 0, 0]]]]


def test_causal_mask_hides_the_future_and_shows_the_diagonal():
    assert as_table(causal_mask(5)) == [
        [
            [
                [1, 0, 0, 0, 0],
                [1, 1, 0, 0, 0],
                [1, 1, 1, 0, 0],
                [1, 1, 1, 1, 0],
                [1, 1, 1, 1, 1],
            ]
        ]
    ]


def test_causal_mask_of_one_position_sees_itself():
    assert as_table(causal_mask(1)) == [[[[1]]]]


def test_the_decoders_mask_is_both_the_padding_and_the_causal_one():
    ids = jnp.array([[2, 8, 5, 0], [2, 0, 6, 3], [0, 0, 0, 0]])
    assert as_table(padding_mask(ids) & causal_mask(4)) == [
        [
            [
                [1, 0, 0, 0],
                [1, 1, 0, 0],
                [1, 1, 1, 0],
                [1, 1, 1, 0],
            ]
        ],
        [
            [
                [1, 0, 0, 0],
                [1, 0, 0, 0],
                [1, 0, 1, 0],
                [1, 0, 1, 1],
            ]
        ],
        [
            [
                [0, 0, 0, 0],
                [0, 0, 0, 0],
                [0, 0, 0, 0],
                [0, 0, 0, 0],
            ]
        ],
    ]
