"""The evaluation in training: what it asks of the function that translates, and how it gives up."""

import signal

import jax
import numpy as np
import pytest

from flaxformer_min.data.batching import evaluation_batches
from flaxformer_min.model.build import split_model
from flaxformer_min.system.signals import AgreedStop, StopRequest
from flaxformer_min.training.loss import make_loss
from flaxformer_min.training.optimizer import make_optimizer
from flaxformer_min.training.prepared_data import prepare_data
from flaxformer_min.training.sharding import make_mesh
from flaxformer_min.training.state import init_state
from flaxformer_min.training.validation import GivenUp, Validation, measure_of
from flaxformer_min.training.workdir import claim
from tools.tiny_config import changed


@pytest.fixture(scope="module")
def data(tiny, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("workdir")
    claim(workdir, tiny)
    return prepare_data(tiny, workdir)


@pytest.fixture(scope="module")
def references(corpus):
    return (corpus / "validation.de").read_text().splitlines()


def validation_with(translate, tiny, data):
    """A Validation and parameters for it."""
    optimizer = make_optimizer(tiny.optimizer, tiny.model.d_model)
    params = init_state(tiny.model, data.tokenizer.vocab_size, optimizer, seed=3).params
    graphdef, _ = split_model(tiny.model, data.tokenizer.vocab_size)
    mesh = make_mesh(tiny.mesh)
    return Validation(tiny, data, graphdef, mesh, translate), params


def test_scores_compare_only_between_equal_texts_and_searches(tiny):
    by_loss = changed(tiny, "train", best_metric="loss")
    search = {"beam_size": 3, "length_penalty_alpha": 0.7, "bleu_tokenize": "intl"}
    for config, comparable in ((tiny, False), (by_loss, True)):
        measure = measure_of(config, "digest")
        assert measure != measure_of(config, "another")
        assert measure == measure_of(changed(config, "data", validation=("x.en", "x.de")), "digest")
        for name, value in search.items():
            other = measure_of(changed(config, "decode", **{name: value}), "digest")
            assert (other == measure) is comparable


@pytest.mark.run
def test_translations_in_any_order_go_to_their_lines_and_what_is_left_out_is_blank(
    tiny, data, corpus, references
):
    asked = []

    def translate(params, lines, first_line):
        asked.append((params, list(lines), first_line))
        last = len(lines) - 1
        yield [(last, references[last])]
        yield [(place, references[place]) for place in range(1, last)]

    validation, params = validation_with(translate, tiny, data)
    texts = validation.translations(params, AgreedStop(StopRequest()))
    ((whole, lines, first_line),) = asked
    assert (lines, first_line) == ((corpus / "validation.en").read_text().splitlines(), 1)
    assert all(len(leaf.devices()) == 1 for leaf in jax.tree.leaves(whole))
    assert texts == ["", *references[1:]]


@pytest.mark.parametrize("count", [1, 2, 3, 41])
def test_the_samples_are_spread_over_the_lines_and_none_comes_twice(tiny, data, count):
    validation, _ = validation_with(lambda *arguments: iter([]), tiny, data)
    validation._sources, validation._references = ([f"{s}{n}" for n in range(count)] for s in "sr")
    samples = validation._samples([f"t{n}" for n in range(count)])
    chosen = {1: [0], 2: [0, 1], 3: [0, 1, 2], 41: [6, 20, 34]}[count]
    assert samples == [
        {"source": f"s{n}", "reference": f"r{n}", "translation": f"t{n}"} for n in chosen
    ]


def test_a_stop_between_two_batches_gives_the_evaluation_up_and_asks_for_no_more(tiny, data):
    stop, batches = StopRequest(), []

    def translate(params, lines, first_line):
        for place in range(len(lines)):
            batches.append(place)
            yield [(place, "x")]
            stop.record(signal.SIGTERM)

    validation, params = validation_with(translate, tiny, data)
    with pytest.raises(GivenUp):
        validation.translations(params, AgreedStop(stop))
    assert batches == [0, 1]  # the second is thrown away


@pytest.mark.run
def test_the_loss_weighs_every_token_alike_over_batches_of_several_shapes(tiny, data):
    tokenizer = data.tokenizer
    validation, params = validation_with(lambda *arguments: iter([]), tiny, data)
    batches = list(evaluation_batches(data.validation, tiny.data, tokenizer.pad_id, 8))
    assert len({batch.target.shape for batch in batches}) > 1
    graphdef, _ = split_model(tiny.model, tokenizer.vocab_size)
    ids = {"pad_id": tokenizer.pad_id, "bos_id": tokenizer.bos_id}
    sums = jax.jit(make_loss(graphdef, **ids, smoothing=0.0))
    each = np.array([sums(params, batch, None) for batch in batches])
    by_batch = (each[:, 0] / each[:, 1]).mean()
    found = validation.loss(params, lambda: False)
    assert found == pytest.approx(each[:, 0].sum() / each[:, 1].sum(), rel=1e-6)
    assert abs(found - by_batch) > 1e-4


def test_a_stop_gives_the_loss_up_before_the_next_batch(tiny, data):
    validation, params = validation_with(lambda *arguments: iter([]), tiny, data)
    asked, answers = [], [False, False, True]

    def sums(params, batch):
        asked.append(batch.target.shape)
        return 1.0, 1.0

    validation._sums = sums
    with pytest.raises(GivenUp):
        validation.loss(params, lambda: answers.pop(0))
    assert len(asked) == 2
