"""Which files of a repository belong to a subset and a split. The expected choices are those of the `datasets` library,
for the layouts that it knows."""

import pytest

from nsa.data.sources.subsets import CARD as README
from nsa.data.sources.subsets import choose
from nsa.data.sources.text import matches
from nsa.errors import DataError

CARD = """---
license: mit
configs:
- config_name: en
  default: true
  data_files:
  - split: train
    path: en/train-*
  - split: validation
    path: [en/held/*.parquet, "en/extra/**"]
- config_name: de
  data_files: de/*.parquet
- config_name: fr
  data_files: [fr/a.parquet, "fr/b*"]
- config_name: it
  data_dir: it
- config_name: es
  data_dir: es
  data_files: {train: "**/*.parquet", test: held.parquet}
- config_name: 2023
  data_files: [{split: train, path: "y/*/*"}]
- config_name: lines
  data_files: lines/*
---
# About
"""
CARD_FILES = [
    *("en/train-0.parquet", "en/held/a.parquet", "en/held/deeper/a.parquet", "en/extra/p/q.parquet"),
    *("en/extra/q.parquet", "en/extra/.x.parquet", "de/a.parquet", "de/readme.txt", "de/x/a.parquet", "fr/a.parquet"),
    *("fr/b1.parquet", "fr/c.parquet", "it/train.parquet", "it/test/a.parquet", "es/a.parquet", "es/b/c.parquet"),
    *("es/held.parquet", "y/1/2.parquet", "y/3.parquet", "lines/a.jsonl.gz", "lines/b.jsonl.gz"),
]


def chosen(names, card="", subset="default", split="train"):
    names = names.split() if isinstance(names, str) else names
    return sorted(choose([README, *names], lambda: card, "a/b at main", subset, split)[0])


@pytest.mark.parametrize(
    ("subset", "split", "names"),
    [
        ("default", "train", "en/train-0.parquet"),
        ("en", "train", "en/train-0.parquet"),
        ("en", "validation", "en/extra/p/q.parquet en/extra/q.parquet en/held/a.parquet"),
        ("de", "train", "de/a.parquet"),
        ("fr", "train", "fr/a.parquet fr/b1.parquet"),
        ("it", "test", "it/test/a.parquet"),
        ("es", "train", "es/a.parquet es/b/c.parquet es/held.parquet"),
        ("es", "test", "es/held.parquet"),
        ("2023", "train", "y/1/2.parquet"),
    ],
)
@pytest.mark.parametrize("ends", ["\n", "\r\n"])
def test_a_readme_says_which_files_are_read(subset, split, names, ends):
    assert chosen(CARD_FILES, CARD.replace("\n", ends), subset, split) == names.split()


@pytest.mark.parametrize(
    ("names", "subset", "split", "expected"),
    [
        ("data/train-00000-of-00002.parquet data/train-00001-of-00002.parquet z.parquet",
         "default", "train", "data/train-00000-of-00002.parquet data/train-00001-of-00002.parquet"),
        ("data/train-00000-of-00001.parquet data/gen-00000-of-00001-x.parquet", "default", "gen",
         "data/gen-00000-of-00001-x.parquet"),
        ("train/a.parquet test/b.parquet my-dev/c.parquet x/train.parquet", "default", "validation",
         "my-dev/c.parquet"),
        ("train/a.parquet test/train.parquet my-dev/c.parquet x/train.parquet y.parquet", "default", "train",
         "train/a.parquet x/train.parquet"),
        ("my_train_file.parquet valid1.parquet eval.parquet in/train.parquet traintest.parquet", "default", "train",
         "in/train.parquet my_train_file.parquet"),
        ("my_train_file.parquet valid1.parquet eval.parquet", "default", "test", "eval.parquet"),
        ("a.parquet b/c.parquet .git/d.parquet", "default", "train", "a.parquet b/c.parquet"),
        ("en/train-00000-of-00001.parquet de/train-00000-of-00001.parquet", "default", "train",
         "de/train-00000-of-00001.parquet en/train-00000-of-00001.parquet"),
        # A folder is a subset of its own, which `datasets` calls a data_dir.
        ("en/train-00000-of-00001.parquet de/train-00000-of-00001.parquet", "en", "train",
         "en/train-00000-of-00001.parquet"),
        ("web/en/train/a.parquet web/en/test/b.parquet web/de/train/a.parquet", "web/en", "train",
         "web/en/train/a.parquet"),
        # The hub's own copies: the branch refs/convert/parquet.
        ("default/train/0000.parquet default/partial-train/0000.parquet", "default", "train",
         "default/train/0000.parquet"),
        ("main/train/0000.parquet main/train/0001.parquet main/test/0000.parquet", "default", "train",
         "main/train/0000.parquet main/train/0001.parquet"),
        ("en/train_a/0000.parquet en/train_b/0000.parquet de/train_b/0000.parquet", "en", "train_b",
         "en/train_b/0000.parquet"),
    ],
)  # fmt: skip
def test_without_a_declaration_names_tell(names, subset, split, expected):
    assert chosen(names, "# About", subset, split) == expected.split()


@pytest.mark.parametrize(
    ("names", "card", "subset", "split", "error"),
    [
        (CARD_FILES, CARD, "english", "train",
         r"data\.subset: a/b at main has no 'english'; it has lines, es, en, default, it, de, fr, 2023"),
        (CARD_FILES, CARD, "en", "test",
         r"data\.split: subset 'en' of a/b at main has no 'test'; it has train, validation"),
        ("en/a.parquet de/a.parquet", "", "nl", "train", r"has no 'nl'; it has en, default, de"),
        ("a/train/0000.parquet b/train/0000.parquet", "", "default", "train", r"has no 'default'; it has a, b"),
        ("a/partial-train/0000.parquet", "", "default", "train", r"has no 'train'; it has partial-train"),
        ("a.parquet", "---\nconfigs: [{config_name: x, data_files: [\n---\n", "x", "train",
         r"`configs` at the top of README\.md cannot be read"),
        ("a.parquet", "---\nconfigs: [en, de]\n---\n", "en", "train", "cannot be read"),
        ("a.parquet", '---\nconfigs: [{config_name: "\\e[31m"}]\n---\n', "en", "train", r"it has \\x1b\[31m$"),
        ("a.parquet", "---\nconfigs: [{config_name: [a]}]\n---\n", "en", "train", r"has no 'en'; it has \['a'\]"),
        ("a.parquet", "---\nconfigs:\n- data_files: ../../etc/*\n---\n", "default", "train", "is outside the repo"),
        ("a.parquet", "---\nconfigs:\n- data_files: 'https://x.org/a.parquet'\n---\n", "default", "train", "outside"),
        ("a.parquet", "---\nconfigs:\n- data_dir: /etc\n---\n", "default", "train", "'/etc' is outside the repo"),
        ("a.parquet", "---\nconfigs:\n- data_dir: a/../..\n---\n", "default", "train", "is outside the repo"),
    ],
)  # fmt: skip
def test_unknown_names_get_a_list_of_known_ones(names, card, subset, split, error):
    with pytest.raises(DataError, match=error):
        chosen(names, card, subset, split)


MERGED = "".join(f"m{n + 1}: &m{n + 1} {{<<: [{', '.join([f'*m{n}'] * 9)}]}}\n" for n in range(9))


@pytest.mark.parametrize(
    ("front", "error"),
    [
        (f"m0: &m0 {{a: 1}}\n{MERGED}", "an alias"),
        ("configs: [&a {config_name: x}, *a]", "an alias"),
        ("configs: [{<<: {config_name: x}}]", "a merge key"),
        ("configs: [{!!merge m: {config_name: x}}]", "a merge key"),
        ("a: " + "x" * 2**21, "more than the 2,097,152"),
    ],
    ids=["many", "alias", "merge", "tag", "size"],
)
@pytest.mark.timeout(150)
def test_a_readme_with_yaml_that_expands_is_refused(front, error):
    with pytest.raises(DataError, match=error):
        chosen("a.parquet", f"---\n{front}\n---\n")


@pytest.mark.timeout(150)
def test_many_stars_in_a_pattern_take_no_longer_than_their_number():
    names = ("a",) * 60
    assert matches(names, ("**", "a") * 25)
    assert not matches(names, (*("**", "a") * 25, "b"))
    assert matches(names, ("**",) * 5000)
    assert not matches((*names, ".hidden"), ("**",) * 5)


@pytest.mark.parametrize(
    ("names", "card", "subset"), [(CARD_FILES, CARD, "lines"), (["x.parquet"], CARD, "de"), ("a.jsonl", "", "default")]
)
def test_a_subset_without_parquet_files_has_no_files(names, card, subset):
    assert chosen(names, card, subset) == []


def test_of_hundreds_of_subsets_the_like_ones_are_shown():
    names = [f"2023.{a}{b}/train.parquet" for a in "abcdefgh" for b in "opqrstuv"]
    with pytest.raises(DataError, match=r"it has 2023\.hv, (2023\.\w\w, ){11}53 more$"):
        chosen(names, "", "2024.hv")
