"""The report on the demo asks for each source in every spelling."""

import unicodedata
from types import SimpleNamespace

from benchmarks.demo_report import print_exact_match, same_in_nfd, typed_spellings
from flaxformer_min.data.phrases import Phrase

TEST = [
    Phrase("May\u2009\u2013\u2009June", "Mai\u2013Juni", "interval"),
    Phrase("7 \u00c5", "7 \u00c5", "measure"),
]


def test_a_source_is_typed_in_the_ways_that_are_not_cldrs() -> None:
    assert typed_spellings(TEST[0].source) == ("May \u2013 June", "May - June")
    assert typed_spellings("in 2 weeks") == ("in 2 weeks",)


def test_answers_that_differ_for_decomposed_text_are_counted() -> None:
    def echo(lines: list[str]) -> list[SimpleNamespace]:
        return [SimpleNamespace(text=line) for line in lines]

    def composed(lines: list[str]) -> list[SimpleNamespace]:
        return echo([unicodedata.normalize("NFC", line) for line in lines])

    texts = [pair.source for pair in TEST]
    for translate, same in ((echo, 1), (composed, 2)):
        assert same_in_nfd(SimpleNamespace(translate=translate), TEST, texts) == same


def test_the_table_has_a_column_for_each_way_and_a_row_for_all(capsys) -> None:
    typed = [TEST[0], TEST[0], TEST[1]]
    print_exact_match(
        {
            "as CLDR": (["Mai\u2013Juni", "7 A"], TEST),
            "typed": (["Mai\u2013Juni", "Mai", "7 \u00c5"], typed),
        }
    )
    rows = [line.rsplit(maxsplit=2) for line in capsys.readouterr().out.splitlines()[3:]]
    assert rows == [
        ["interval", "100.0", "50.0"],
        ["measure", "0.0", "100.0"],
        ["all", "50.0", "66.7"],
    ]
