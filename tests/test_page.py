"""The page computes in a browser what the package computes, and a reader can work with it.

The tests with a browser are skipped where there is none; `.ci/run` installs one.
"""

import base64
import dataclasses
import io
import json
import random
import re
import time
import tomllib
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sentencepiece
import tiny_model
from sentencepiece.sentencepiece_model_pb2 import ModelProto

from flaxformer_min import cli
from flaxformer_min.checkpoints.format import Loaded
from flaxformer_min.checkpoints.leaves import named_leaves
from flaxformer_min.config import Config, DataConfig, DecodeConfig, ModelConfig
from flaxformer_min.data.tokenizer import Tokenizer
from flaxformer_min.data.tokenizer_training import train_tokenizer
from flaxformer_min.decoding.options import Options
from flaxformer_min.decoding.translator import Translator
from flaxformer_min.errors import UserError
from flaxformer_min.model.build import count_parameters, split_model
from flaxformer_min.model.masks import causal_mask, padding_mask
from flaxformer_min.see.page import (
    PARTS,
    WORKER,
    choose_examples,
    join,
    make_page,
    read,
    script,
    to_float16,
)
from flaxformer_min.see.pieces import describe_tokenizer
from tools.browser import Browser, find_browser

ROOT = Path(__file__).parent.parent
LINES = ["abc cab", "bad dad fed", "a b c d e f g", "gag", "fee bee", "ab cd ef", "dada", "face"]
ODD = ["", " ", "  ab  cd ", "\u2581a\u2581", "a\u00a0b\u202fc", "e\u0301a\u0308", "\u4f60\u597d a"]
ODD += ["\U0001f600\U0001f600b", "<s></s><pad><unk>", "<0x41>", "ab\u2028cd", "\ufeffa", "\x01\t"]
DATA = DataConfig(
    train=("a", "b"),
    validation=("c", "d"),
    source_language="en",
    target_language="de",
    vocab_size=tiny_model.VOCAB_SIZE,
    byte_fallback=False,
)


def tokenizer_of(**data: Any) -> Tokenizer:
    text = [*LINES, *LINES, "gebe cafe bade dcba", "0 1 2"]
    return Tokenizer(train_tokenizer(text, dataclasses.replace(DATA, **data)))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tokenizer_of()


@pytest.fixture(scope="module")
def with_bytes() -> Tokenizer:
    return tokenizer_of(vocab_size=300, byte_fallback=True)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if find_browser() is None:
        pytest.skip("there is no Chromium on PATH; install the package chromium")
    with Browser() as running:
        yield running


@pytest.fixture(scope="module")
def page(browser: Browser, tokenizer: Tokenizer, tmp_path_factory) -> Callable[..., Browser]:
    """`page(before)` opens a page of a small random model, after the script `before`."""
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(make_page(Translator(*loaded(tokenizer)), LINES), encoding="utf-8")

    def opened(before: str = "") -> Browser:
        browser.errors.clear()
        browser.requests.clear()
        browser.prefer(still=True)  # everything is shown at once
        browser.open(path, before)
        return browser

    return opened


def loaded(tokenizer: Tokenizer, model: ModelConfig = tiny_model.CONFIG) -> Loaded:
    """A checkpoint of random weights that float16 holds exactly."""
    params = jax.tree.map(lambda x: np.float32(np.float16(x)), tiny_model.random_params(model))
    config = Config(model=model, data=DATA, decode=DecodeConfig(max_length_offset=5))
    return Loaded(config, tokenizer, params, 1)


def run(browser: Browser, code: str, **values: Any) -> Any:
    """Runs code beside the worker's functions, with these values, and returns what it returns."""
    given = "".join(f"const {name} = {json.dumps(value)};\n" for name, value in values.items())
    return browser.evaluate(f"(() => {{ {script(WORKER)}\n{given}\n{code} }})()")


def wait(browser: Browser, condition: str) -> None:
    until = time.monotonic() + 60
    while not browser.evaluate(condition):
        assert time.monotonic() < until, f"never came true: {condition}"
        time.sleep(0.02)


def write(browser: Browser, line: str) -> None:
    browser.evaluate(
        f"document.getElementById('source').value = {json.dumps(line)};"
        "document.getElementById('source').dispatchEvent(new Event('input'));"
    )


def text(browser: Browser, name: str) -> str:
    return browser.evaluate(f"document.getElementById('{name}').textContent")


ENDED = "document.getElementById('play').textContent === 'Again'"
MODEL = """
const bytes = Uint8Array.from(atob(weights), (c) => c.charCodeAt(0));
const model = makeModel(config, unpack(bytes, table), pad);
"""
ARRAYS = """
return sources.map((source, n) => {
  const taps = {};
  const steps = encode(model, source, taps);
  let end = steps.next();
  while (!end.done) end = steps.next();
  const cache = startDecoding(model, end.value, targets[n].length);
  const found = {};
  for (const [name, { data }] of Object.entries(taps)) found[name] = [...data];
  for (const token of targets[n]) {
    const seen = {};
    seen.logits = decodeStep(model, cache, token, seen);
    for (const [name, { data }] of Object.entries(seen)) (found[name] ??= []).push(...data);
  }
  return found;
});
"""


def weights_of(checkpoint: Loaded) -> dict[str, Any]:
    leaves = {n: to_float16(n, leaf) for n, leaf in named_leaves(checkpoint.params).items()}
    return {
        "config": dataclasses.asdict(checkpoint.config.model),
        "table": [[name, leaf.shape] for name, leaf in leaves.items()],
        "weights": base64.b64encode(b"".join(x.tobytes() for x in leaves.values())).decode(),
        "pad": 0,
    }


def arrays_of_the_package(model: Any, sources: jax.Array, targets: jax.Array) -> dict[str, Any]:
    """What the package computes, by the page's names: [B, ...]."""
    config, found, masks = model.config, {}, padding_mask(sources)
    table = model.embedding if config.share_embeddings == "all" else model.source_embedding
    x = model.embed(table, sources, model.positions("source", sources.shape[1])[None])
    found["encoder/sum"] = x
    for n, layer in enumerate(model.encoder):
        taps: dict[str, Any] = {}
        x = layer(x, masks, None, taps)
        found[f"encoder/{n}/self_attention/weights"] = taps["self_attention"]["weights"]
        found[f"encoder/{n}/feed_forward_residual/norm"] = x
    memory, causal = x, padding_mask(targets) & causal_mask(targets.shape[1])
    y = model.embed(model.embedding, targets, model.positions("target", targets.shape[1])[None])
    found["decoder/sum"] = y
    for n, layer in enumerate(model.decoder):
        y = layer(y, memory, causal, masks)
        found[f"decoder/{n}/feed_forward_residual/norm"] = y
    return found | {"logits": model.project(y)}


@pytest.mark.parametrize("variant", tiny_model.VARIANTS)
def test_every_array_of_the_page_is_that_of_the_package(browser, tokenizer, variant):
    checkpoint = loaded(tokenizer, tiny_model.VARIANTS[variant])
    lengths = [11, 4, 7, 1, 10, 2, 3, 5, 8, 0], [6, 13, 1, 9, 12, 2, 3, 5, 8, 7]
    sources, targets = (tiny_model.padded_ids(n, lengths[n], 11 + 2 * n) for n in (0, 1))
    params = jax.tree.map(jnp.asarray, checkpoint.params)
    model = tiny_model.build(checkpoint.config.model, params)
    wanted = arrays_of_the_package(model, sources, targets)
    assert len(wanted) >= 6
    rows = [ids[:length].tolist() for ids, length in zip(targets, lengths[1], strict=True)]
    given = weights_of(checkpoint) | {"sources": sources.tolist(), "targets": rows}
    for n, found in enumerate(run(browser, MODEL + ARRAYS, **given)):
        for name, array in wanted.items():
            here = np.asarray(array[n])
            if name.startswith("decoder") or name == "logits":
                here = here[: lengths[1][n]]  # the rest is padding, which the page never computes
            np.testing.assert_allclose(
                np.reshape(found[name], here.shape), here, rtol=1e-4, atol=1e-4, err_msg=name
            )


TRANSLATE = """
return lines.map((line) => {
  const all = [...translate(model, new Pieces(tokenizer), offset, new Set(never), line)];
  const steps = all.filter((step) => step && step.candidates);
  const text = steps.length ? steps[steps.length - 1].text : "";
  return [text, steps.map((step) => step.token), steps.map((step) => step.candidates[0][1])];
});
"""


def test_the_page_finds_what_greedy_search_finds_and_its_log_probabilities(browser, tokenizer):
    checkpoint = loaded(tokenizer)
    translator = Translator(*checkpoint)
    lines = [*LINES, *ODD, "ab " * 40]  # the last one is longer than the model takes
    wanted = translator.translate(lines, Options(beam_size=1))
    given = weights_of(checkpoint) | {"tokenizer": describe_tokenizer(tokenizer), "lines": lines}
    never = [int(i) for i in tokenizer.never_generated]
    found = run(browser, MODEL + TRANSLATE, **given, offset=5, never=never)
    assert sum(translation.finished for translation in wanted) > 0
    for (line, tokens, log_probs), translation in zip(found, wanted, strict=True):
        assert (line, tuple(tokens)) == (translation.text, translation.tokens)
        assert sum(log_probs) == pytest.approx(translation.log_prob, abs=1e-3)


def test_ids_and_texts_are_those_of_sentencepiece(browser, tokenizer, with_bytes):
    rng = random.Random(1)
    alphabet = "abcdefg  \u2581\u00e9\u0301\u4e2d\u00a0\U0001f600"
    random_lines = ["".join(rng.choices(alphabet, k=rng.randrange(30))) for _ in range(500)]
    for each in (tokenizer, with_bytes):
        model = sentencepiece.SentencePieceProcessor(model_proto=each.model_bytes)
        lines = [*ODD, *random_lines]
        ids = [rng.choices(range(each.vocab_size), k=rng.randrange(12)) for _ in range(500)]
        code = """
        const pieces = new Pieces(tokenizer);
        return [lines.map((line) => pieces.encode(line)), ids.map((some) => pieces.decode(some))];
        """
        described = describe_tokenizer(each) | {"nfc": False}
        encoded, decoded = run(browser, code, tokenizer=described, lines=lines, ids=ids)
        assert encoded == [[*model.encode(line), each.eos_id] for line in lines]
        assert decoded == [each.decode(some) for some in ids]


def test_text_is_brought_to_nfc_for_a_tokenizer_that_says_so(browser, with_bytes):
    named = ModelProto.FromString(with_bytes.model_bytes)
    named.normalizer_spec.name = "nfc"
    described = describe_tokenizer(Tokenizer(named.SerializeToString()))
    lines = ["e\u0301", "A\u030a", "\u212b", "\u1100\u1161", "q\u0307\u0323", "ab"]
    code = "return lines.map((line) => new Pieces(tokenizer).encode(line));"
    found = run(browser, code, tokenizer=described, lines=lines)
    model = sentencepiece.SentencePieceProcessor(model_proto=with_bytes.model_bytes)
    composed = [model.encode(unicodedata.normalize("NFC", line)) for line in lines]
    assert [ids[:-1] for ids in found] == composed
    assert composed[0] != model.encode(lines[0])


def test_every_float16_is_read_as_the_number_that_it_is(browser):
    every = np.arange(65536, dtype="<u2").view("<f2")
    finite = every[np.isfinite(every)]
    code = "return [...fromFloat16(Uint8Array.from(atob(bytes), (c) => c.charCodeAt(0)))];"
    found = run(browser, code, bytes=base64.b64encode(finite.tobytes()).decode())
    assert np.array_equal(np.asarray(found), finite.astype(float))


def test_a_line_is_blank_where_it_is_for_python(browser):
    characters = list(map(chr, range(0x3100)))
    found = run(browser, "return characters.map((c) => isBlank(c));", characters=characters)
    assert found == [c.isspace() for c in characters]


def test_the_page_translates_without_an_error_and_without_a_network(page, tokenizer):
    running = page()
    wait(running, ENDED)
    wanted = Translator(*loaded(tokenizer)).translate(choose_examples(LINES), Options(beam_size=1))
    assert text(running, "target") == wanted[0].text
    chips = "document.getElementById('examples').children"
    assert running.evaluate(f"{chips}.length") == 6
    running.evaluate(f"{chips}[2].click()")
    wait(running, f"document.getElementById('target').textContent === {wanted[3].text!r}")
    assert running.errors == []
    assert {url.split(":")[0] for url in running.requests} <= {"file", "blob", "data"}
    assert sum(url.startswith("file:") for url in running.requests) == 1


def test_of_ten_fast_edits_the_last_one_wins(page, tokenizer):
    running, lines = page(), ["a" * n for n in range(1, 10)] + ["bad dad"]
    wait(running, ENDED)
    enter = "dispatchEvent(new KeyboardEvent('keydown', {key: 'Enter'}))"  # asks without a delay
    running.evaluate(
        f"for (const line of {json.dumps(lines)}) {{ const source = "
        f"document.getElementById('source'); source.value = line; source.{enter}; }}"
    )
    wanted = Translator(*loaded(tokenizer)).translate(["bad dad"], Options(beam_size=1))[0]
    wait(running, f"document.getElementById('target').textContent === {wanted.text!r} && {ENDED}")
    time.sleep(0.3)  # an answer to an earlier line would come by then
    count = len(wanted.tokens)
    assert text(running, "target") == wanted.text
    assert text(running, "place") == f"token {count} of {count}"
    assert running.errors == []


def test_a_blank_line_has_an_empty_translation_and_the_keys_do_nothing(page):
    running = page()
    wait(running, ENDED)
    write(running, " \t")
    wait(running, "document.getElementById('writing').textContent === 'Nothing to write'")
    running.evaluate("document.activeElement.blur()")
    running.press("ArrowRight", code=39)
    running.press(" ", code=32, text=" ")
    running.evaluate("new Promise((done) => setTimeout(() => requestAnimationFrame(done), 50))")
    assert (text(running, "target"), text(running, "place")) == ("", "")
    assert "T = 0" in text(running, "shapes")
    assert running.errors == []


def test_the_keyboard_alone_steps_pauses_and_picks_a_box(page):
    running = page()
    wait(running, ENDED)
    steps = int(text(running, "place").split()[-1])
    running.evaluate("document.body.focus()")
    running.press("ArrowLeft", code=37)
    wait(
        running, f"document.getElementById('place').textContent === 'token {steps - 1} of {steps}'"
    )
    running.press(" ", code=32, text=" ")
    wait(running, ENDED)
    seen = set()
    for _ in range(60):
        running.press("Tab", code=9)
        name = running.evaluate("document.activeElement.dataset.part || document.activeElement.id")
        seen.add(name)
        if name == "linear":
            running.press("Enter", code=13, text="\r")
    wait(running, "document.getElementById('name').textContent === 'Linear'")
    controls = {
        "source",
        "back",
        "play",
        "forward",
        "pace",
        "site",
        "site-layer",
        "queries",
        "a",
        "b",
    }
    assert controls | set(json.loads(read("parts.json"))) <= seen
    assert running.errors == []


def test_a_screen_reader_has_a_name_for_every_control(page):
    running = page()
    wait(running, ENDED)
    roles = {"button", "slider", "combobox", "textbox", "listbox", "option", "image"}
    controls = [node for node in running.accessibility() if node["role"] in roles]
    assert len(controls) > 30
    assert [node for node in controls if not node["name"]] == []
    assert (
        running.evaluate("document.getElementById('target').getAttribute('aria-live')") == "polite"
    )


def test_nothing_overlaps_the_edge_of_a_narrow_screen(page):
    running = page()
    wait(running, ENDED)
    running.resize(380, 800)
    assert running.evaluate("document.documentElement.scrollWidth") <= 380
    running.resize(1280, 800)
    fits = "document.getElementById('stage').getBoundingClientRect().bottom <= 800"
    assert running.evaluate(fits)


def test_an_old_browser_gets_one_line(page):
    running = page("delete window.Worker")
    shown = running.evaluate("document.body.innerText").strip()
    assert shown == "This page needs a browser of 2023 or later."
    assert running.errors == []


def test_every_part_of_the_drawing_is_explained_by_code_that_is_there():
    parts = json.loads(read("parts.json"))
    drawn = re.findall('data-part="(.*?)"', read("figure1.svg"))
    assert len(drawn) == 16
    assert sorted(drawn) == sorted(parts)
    for part in parts.values():
        file, name = part["code"].split(": ")
        source = (ROOT / "flaxformer_min" / file).read_text(encoding="utf-8")
        assert re.search(rf"(def|class) {name.split('.')[-1]}\b", source), part["code"]


@pytest.mark.parametrize(
    "model", [ModelConfig(), ModelConfig(d_model=1024, d_ff=4096, num_heads=16)]
)
def test_the_sizes_of_base_and_big_are_those_of_the_package(model):
    total = count_parameters(split_model(model, 37_000)[1])
    cache = 4 * model.num_layers * model.num_heads * (model.d_k + model.d_v)
    said = f"{total:,} parameters; {cache:,} bytes of cache per token written, in float32"
    assert said in read("page.html")
    parts = re.findall(rf"{total:,} param.*\n.*\n *<p.*?>(.*)</p>", read("page.html"))[0]
    assert sum(int(n.replace(",", "")) for n in re.findall(r" ([\d,]*\d)", parts)) == total


def test_the_page_keeps_to_its_budget_of_lines():
    lines = "".join(read(path.name) for path in PARTS.glob("*.js")).splitlines()
    code = [line for line in map(str.strip, lines) if line]
    comments = sum(line.startswith(("//", "/**", "*")) for line in code)
    assert comments > 60
    assert 800 < len(code) - comments <= 900


def test_an_installed_package_has_the_files_of_the_page():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = settings["tool"]["setuptools"]["package-data"]["flaxformer_min"]
    packed = {path for p in patterns for path in (ROOT / "flaxformer_min").glob(p)}
    assert set(PARTS.iterdir()) <= packed


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"model_type": "unigram"}, "is no BPE model"),
        ({"normalization_rule_name": "nmt_nfkc"}, "changes text by rules"),
        ({"remove_extra_whitespaces": True}, "changes text by rules"),
        ({"treat_whitespace_as_suffix": True}, "marks words by what follows"),
        ({"user_defined_symbols": ["ab"]}, "has pieces of a user"),
    ],
)
def test_a_tokenizer_that_the_page_does_not_know_is_refused_in_one_line(options, reason):
    plain = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    known = Tokenizer(trained_with(plain))
    assert describe_tokenizer(known)["pieces"]
    with pytest.raises(UserError, match=f"its tokenizer {reason}, which the page cannot do"):
        describe_tokenizer(Tokenizer(trained_with(plain | options)))


def trained_with(options: dict[str, Any]) -> bytes:
    model = io.BytesIO()
    settings = {"vocab_size": 20, "model_type": "bpe", "hard_vocab_limit": False} | options
    lines = iter(LINES * 3)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines, model_writer=model, minloglevel=2, **settings
    )
    return model.getvalue()


def test_a_weight_beyond_float16_is_named(tokenizer):
    with pytest.raises(UserError, match="encoder/0/up: a weight of 70000 is too large for float16"):
        to_float16("encoder/0/up", np.array([1.0, -70_000.0], np.float32))


def test_lines_that_are_all_blank_make_no_page(tokenizer):
    with pytest.raises(UserError, match="no line to begin with"):
        make_page(Translator(*loaded(tokenizer)), ["", " "])


def test_text_of_the_checkpoint_cannot_end_the_script_that_holds_it():
    content = join({"examples": ["</script><script>alert(1)</script><!--"]}, b"")
    assert "alert(1)" in content
    assert "<script>alert(1)" not in content
    assert content.count("<!--") == 0


def test_the_command_writes_the_page_and_says_how_large_it_is(finished, tmp_path, capsys):
    source, output = tmp_path / "lines", tmp_path / "page.html"
    source.write_text("a cat\nseven dogs\n")
    arguments = ["page", str(finished), "--source", str(source), "--output", str(output)]
    assert cli.main(arguments) == 0
    assert f"{output}: " in capsys.readouterr().err
    assert '"examples": ["seven dogs", "a cat"]' in output.read_text(encoding="utf-8")
