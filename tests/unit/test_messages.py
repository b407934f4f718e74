"""Every text of the package is in one list, so that rewording one changes one file of tests."""

from __future__ import annotations

from tests.support.messages import LIST, messages


def test_the_list_has_all_texts_of_the_package() -> None:
    known, found = LIST.read_text().splitlines(), messages()
    assert found == known, "look at the difference that `python -m tests.support.messages` makes"
