"""Fitting: which number of a program is which expression of which sizes. Without torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lazystep.family.expression import evaluate, from_data, holds, to_text
from lazystep.family.fit import Fit, NoFitError, fit
from lazystep.family.skeleton import Kind, Place

LENGTHS = (6, 9, 17, 26)


def fitted(sizes: Sequence[Sequence[int]], *numbers: Callable[..., int], members: int = 3) -> Fit:
    """Fit programs with these input sizes, and literals that are functions of the sizes."""
    rows = [(*row, *(number(*row) for number in numbers)) for row in sizes[:members]]
    places = [Place(Kind.SIZE, i, 0) for i in range(len(sizes[0]))]
    places += [Place(Kind.LITERAL, i, 0) for i in range(len(numbers))]
    return fit(places, rows)


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (lambda s: s, "s0"),
        (lambda s: 4 * s, "4*s0"),
        (lambda s: -s, "-1*s0"),
        (lambda s: s + 3, "s0 + 3"),
        (lambda s: s - 1, "s0 + -1"),
        (lambda s: 5 - s, "-1*s0 + 5"),
        (lambda s: 3 * s + 2, "3*s0 + 2"),
        (lambda s: s * s, "s0*s0"),
        (lambda s: 2 * s * s * s, "2*s0*s0*s0"),
        (lambda s: s // 2, "s0 // 2"),
        (lambda s: (s + 2 - 3) // 2 + 1, "(s0 + 1) // 2"),
        (lambda s: -s % 8, "8*((s0 + 7) // 8) + -1*s0"),
        (lambda s: (s + 7) // 8 * 8, "8*((s0 + 7) // 8)"),
        (lambda s: s % 4, "s0 % 4"),
        (lambda s: 7, "7"),
    ],
)
def test_forms_are_found_and_hold_for_a_fourth_member(number: Callable[..., int], text: str) -> None:
    found = fitted([(s,) for s in LENGTHS], number)
    assert to_text(found.expressions[1]) == text
    assert found.bind((26, number(26))) == (26,)
    assert found.bind((26, number(26) + 1)) is None


def test_parts_of_what_is_padded_are_found() -> None:
    found = fitted([(8,), (9,), (14,), (3,)], lambda s: (s + 3) // 4 * 2 - 1, members=4)
    assert to_text(found.expressions[1]) == "2*((s0 + 3) // 4) + -1"


def test_two_sizes_are_two_symbols_and_their_products() -> None:
    found = fitted([(4, 10), (3, 16), (7, 11)], lambda b, t: b * t, lambda b, t: (t + 1) * b * 8)
    assert [to_text(e) for e in found.expressions] == ["s0", "s1", "s0*s1", "8*s0 + 8*s0*s1"]
    assert found.bind((2, 5, 10, 96)) == (2, 5)


def test_a_length_that_is_padded_and_halved_is_no_chance_division() -> None:
    found = fitted([(9,), (10,), (15,)], lambda s: -s % 4, lambda s: (s + -s % 4) // 2)
    for length in (21, 11, 30):
        assert found.bind((length, -length % 4, (length + -length % 4) // 2)) == (length,)


def test_a_size_that_depends_on_another_is_no_symbol() -> None:
    found = fitted([(6, 48, 7), (9, 72, 10)], members=2)
    assert len(found.symbols) == 1
    assert [to_text(e) for e in found.expressions] == ["s0", "8*s0", "s0 + 1"]


def test_two_members_that_look_related_are_refitted_by_a_third() -> None:
    nodes_and_edges = [(10, 30), (20, 60), (15, 44)]
    too_few = fitted(nodes_and_edges, members=2)
    assert to_text(too_few.expressions[1]) == "3*s0"
    assert too_few.bind(nodes_and_edges[2]) is None
    assert too_few.misfit(nodes_and_edges[2]) == 1
    assert fitted(nodes_and_edges).bind((7, 50)) == (7, 50)


def test_a_number_without_a_size_is_carried() -> None:
    places = [Place(Kind.SIZE, 0, 0), Place(Kind.GEOMETRY, 1, 2), Place(Kind.LITERAL, 0, 0)]
    found = fit(places, [(32, 0, -5), (32, 64, -3), (32, 37, -11)])
    assert [one.carries for one in found.symbols] == [1, -1]
    assert found.bind((32, 999, -1)) == (1001, 3)
    assert found.bind((31, 999, -1)) is None


def test_what_has_no_form_is_refused_with_its_place() -> None:
    places = [Place(Kind.SIZE, 0, 0), Place(Kind.LITERAL, 5, 1)]
    with pytest.raises(NoFitError, match="varies as 3, -4, 50") as caught:
        fit(places, [(4, 3), (5, -4), (9, 50)])
    assert caught.value.place == places[1]
    rows = [[(7 * i * i + 13 * i + 5 * j * i + 2 * j * j) % 97 + 2 for i in range(7)] for j in range(4)]
    with pytest.raises(NoFitError, match="7 sizes vary independently"):
        fit([Place(Kind.SIZE, i, 0) for i in range(7)], rows)
    with pytest.raises(NoFitError, match="only one program"):
        fit(places, [(4, 3)])


FORMS = st.one_of(
    st.tuples(st.integers(-8, 8), st.integers(-20, 20)).map(lambda cd: lambda s: cd[0] * s + cd[1]),
    st.integers(-8, 8).map(lambda c: lambda s: c * s * s),
)


@given(
    st.lists(st.integers(2, 200), min_size=4, max_size=7, unique=True),
    st.lists(FORMS, min_size=1, max_size=6),
)
def test_three_members_say_what_any_other_is(lengths: list[int], numbers: list[Callable[[int], int]]) -> None:
    try:
        found = fitted([(s,) for s in lengths], *numbers)
    except NoFitError:
        assume(False)
    for length in lengths:
        row = (length, *(number(length) for number in numbers))
        assert found.bind(row) == (length,)
        assert tuple(evaluate(e, (length,)) for e in found.expressions) == row


@given(
    st.lists(st.tuples(*[st.integers(-50, 50)] * 4), min_size=2, max_size=5),
    st.tuples(*[st.integers(-50, 50)] * 4),
)
def test_whatever_is_fitted_holds_for_its_members_and_refuses_what_differs(
    rows: list[tuple[int, ...]], other: tuple[int, ...]
) -> None:
    places = [Place(Kind.SIZE, 0, 0), *(Place(Kind.LITERAL, i, 0) for i in range(3))]
    rows = [(abs(row[0]) + 2, *row[1:]) for row in rows]
    try:
        found = fit(places, rows)
    except NoFitError:
        return
    for row in rows:
        values = found.bind(row)
        assert values is not None
        assert tuple(evaluate(e, values) for e in found.expressions) == row
    values = found.bind(other)
    assert values is None or tuple(evaluate(e, values) for e in found.expressions) == other


def test_expressions_are_plain_data() -> None:
    condition = ("and", ("==", ("%", ("s", 0), 8), 0), ("<", ("s", 1), ("*", 4, ("s", 0))))
    again = from_data(json.loads(json.dumps(condition)))
    assert again == condition
    assert holds(again, (16, 20))
    assert not holds(again, (12, 20))
    assert not holds(("==", ("//", 1, ("s", 0)), 1), (0,))  # can't be computed: not true
    assert to_text(condition) == "s0 % 8 == 0 and s1 < 4*s0"
    for wrong in (True, "s0", ["exec", 1], 1.5, ["s", "x"]):
        with pytest.raises(ValueError, match="no expression"):
            from_data(wrong)
