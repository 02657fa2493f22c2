"""Sinusoidal positional encoding (paper, section 3.5)."""

import numpy as np
from jaxtyping import Float


def sinusoidal_positions(length: int, d_model: int) -> Float[np.ndarray, "length D"]:
    """Returns the table of encodings for positions 0 to length - 1, [length, D], float32.

    PE(pos, 2i) = sin(pos / 10000^(2i/D)), and PE(pos, 2i+1) is the cosine of the same angle: sines
    and cosines are interleaved, as the paper writes them. The table is computed in float64 on the
    host, so that late positions lose no digits to a float32 angle; under jit it is a constant.
    Raises ValueError if D is odd.

    >>> print(sinusoidal_positions(2, 4).round(2))
    [[0.   1.   0.   1.  ]
     [0.84 0.54 0.01 1.  ]]
    """
    if length < 1:
        raise ValueError(f"length is {length}: it must be at least 1")
    if d_model < 1 or d_model % 2:
        raise ValueError(f"d_model is {d_model}: it must be even, for sines and cosines alternate")
    angle = np.arange(length)[:, None] / 10000 ** (np.arange(0, d_model, 2) / d_model)
    return (
        np.stack([np.sin(angle), np.cos(angle)], axis=-1)
        .reshape(length, d_model)
        .astype(np.float32)
    )
