"""The FLOPs of the model's matrix products, and what a step of a search must read, by formula."""

from flaxformer_min.config import ModelConfig
from flaxformer_min.data.batch import Bucket


def step_flops(model: ModelConfig, vocab_size: int, bucket: Bucket) -> int:
    """Returns the FLOPs of the matrix products of one step on all devices, by formula.

    Padding and masked scores are included. The backward pass costs twice the forward pass.
    Rematerialisation repeats some products; the repetitions do not count, so that utilisation is
    comparable with and without it.
    """
    rows, source, target = bucket
    d, heads = model.d_model, model.num_heads

    def attention(queries: int, keys: int) -> int:
        widths = heads * (model.d_k + model.d_v)
        # Projections of queries and outputs, of keys and values, then scores and weighted sums.
        return queries * d * widths + keys * d * widths + queries * keys * widths

    def feed_forward(positions: int) -> int:
        return 2 * positions * d * model.d_ff

    encoder = attention(source, source) + feed_forward(source)
    decoder = attention(target, target) + attention(target, source) + feed_forward(target)
    layers = encoder * model.num_layers + decoder * (model.num_decoder_layers or model.num_layers)
    products = layers + target * d * vocab_size
    return 3 * 2 * rows * products


def search_reads(
    model: ModelConfig, vocab_size: int, rows: int, width: int, past: float
) -> tuple[int, float]:
    """Returns how many weights, and how many keys and values, a step of a search has to read.

    It has `rows` sentences of `width` source positions, which are read once for all hypotheses of a
    sentence. `past` is how many positions of the past of a sentence's hypotheses are read. A weight
    takes part in two FLOPs for each hypothesis.
    """
    d, layers = model.d_model, model.num_decoder_layers or model.num_layers
    widths = model.num_heads * (model.d_k + model.d_v)
    # Self-attention has four kernels; those for keys and values of the memory are not read.
    weights = layers * (3 * d * widths + 2 * d * model.d_ff) + vocab_size * d
    return weights, layers * widths * rows * (past + width)
