"""tasks: counts, balance, pairs, answers and held-out groups, by a small interpreter made here."""

import random
import re
from collections import Counter
from itertools import groupby

import pytest

from corpora import tasks

DISTRACTORS, REGISTERS, WRITES = (
    (0, 8, 32, 128),
    ((1, 16), (2, 8), (4, 4), (8, 2)),
    ((8, 2), (8, 4), (8, 8)),
)
REGISTER_SETS = sorted({*REGISTERS, *WRITES})


@pytest.fixture(scope="module")
def text() -> str:
    return tasks.text()


def answer(prompt: str) -> str:
    """The prompt, run line by line."""
    names: dict[str, str] = {}
    *lines, ask = prompt.lstrip("\n").split("\n")
    for line in lines:
        name, value = line.split("=")
        if name == "s+":
            assert value == "0"
        elif name == "s^":
            assert value in "01" and "s" in names
        else:
            names[name] = value
    match ask:
        case "S:":
            return "d" if names["need"] == names["done"] else "m"
        case "F:":
            return names["x"]
        case "V:":
            return names[names["query"]]
    raise AssertionError(ask)


def in_groups(examples) -> list[list[tasks.Example]]:
    return [list(group) for _, group in groupby(examples, key=lambda example: example.group)]


def assignments(prompt: str) -> list[tuple[str, str]]:
    return re.findall(r"(r\d)=(\d)\n", prompt.replace("query=r", "query="))


def registers_asked(text: str) -> list[str]:
    """Every schedule of the text as its own string of assignments."""
    return re.findall(r"(?:r\d=\d\n)+(?=s=)", text)


# Counts and lengths


@pytest.mark.parametrize("n", DISTRACTORS)
def test_completion_has_80_groups_of_20(n):
    examples = tasks.completion(n)
    assert len(examples) == 1600 and [len(group) for group in in_groups(examples)] == [20] * 80
    assert {len(example.prompt) for example in examples} == {{0: 22, 8: 62, 32: 182, 128: 662}[n]}
    assert all(example.prompt.count("s+=0\n") == n for example in examples)


@pytest.mark.parametrize("n", DISTRACTORS)
def test_memory_has_128_groups_of_10(n):
    examples = tasks.memory(n)
    assert len(examples) == 1280 and [len(group) for group in in_groups(examples)] == [10] * 128
    assert {len(example.prompt) for example in examples} == {{0: 50, 8: 90, 32: 210, 128: 690}[n]}
    assert all(
        example.prompt.count("s+=0\n") == n and example.prompt.count("s^=") == 8
        for example in examples
    )


@pytest.mark.parametrize("m, writes", REGISTER_SETS)
def test_registers_have_128_groups_of_two_schedules_by_m_queries(m, writes):
    examples = tasks.registers(m, writes)
    assert [len(group) for group in in_groups(examples)] == [2 * m] * 128
    assert {len(example.prompt) for example in examples} == {
        {16: 180, 32: 276, 64: 468}[m * writes]
    }
    for example in examples:
        assert Counter(name for name, _ in assignments(example.prompt)) == {
            f"r{i}": writes for i in range(m)
        }
        assert re.search(r"\ns=\d\n(s\+=0\n){7}query=r\d\nV:$", example.prompt)


def test_the_sweeps_have_the_papers_counts():
    sets = tasks.probe_sets()
    assert list(sets) == [
        *(("completion", n) for n in DISTRACTORS),
        *(("memory", n) for n in DISTRACTORS),
        *(("registers", m) for m, _ in REGISTERS),
        *(("writes", n) for _, n in WRITES),
    ]
    assert sum(len(sets["registers", m]) for m, _ in REGISTERS) == 3840
    assert [len(sets["writes", n]) for _, n in WRITES] == [2048, 2048, 2048]
    assert sets["registers", 8] == sets["writes", 2] == tasks.registers(8, 2)
    assert sets["memory", 8] == tasks.memory(8)


def test_probe_sets_by_seed_and_number_of_groups():
    few = tasks.probe_sets(seed=3, n_groups=5)
    for key, examples in tasks.probe_sets(seed=3).items():
        assert (
            few[key] == [example for example in examples if example.group in (0, 1, 2, 3, 4)] != []
        )
    for make in (
        lambda seed: tasks.completion(8, seed),
        lambda seed: tasks.memory(8, seed),
        lambda seed: tasks.registers(4, 4, seed),
    ):
        assert make(1) == make(1) != make(2)


# Balance, matched pairs, answers


@pytest.mark.parametrize(
    "make",
    [
        *(lambda n=n: tasks.completion(n) for n in DISTRACTORS),
        *(lambda n=n: tasks.memory(n) for n in DISTRACTORS),
        *(lambda m=m, w=w: tasks.registers(m, w) for m, w in REGISTER_SETS),
    ],
)
def test_answers_are_right_and_balanced_in_every_group(make):
    examples = make()
    assert all(answer(example.prompt) == example.answer for example in examples)
    assert all(example.prompt.endswith(":") for example in examples)
    for group in in_groups(examples):
        assert set(Counter(example.answer for example in group).values()) == {len(group) // 2}
        assert len({example.prompt for example in group}) == len(group)


def test_completion_balances_numerals_over_fields_and_answers():
    seen, pairs = Counter(), set()
    for group in in_groups(tasks.completion(0)):
        fields = [
            re.match(r"need=(\d\d)\ndone=(\d\d)\ns=(\d)\n", example.prompt).groups()
            for example in group
        ]
        a, b = {need for need, _, _ in fields}
        assert Counter(fields) == {
            (x, y, s): 1 for x in (a, b) for y in (a, b) for s in {s for _, _, s in fields}
        }
        assert len({s for _, _, s in fields}) == 5
        pairs.add(frozenset((a, b)))
        for (need, done, _), example in zip(fields, group, strict=True):
            seen.update([("need", need, example.answer), ("done", done, example.answer)])
    assert len(pairs) == 80
    assert len(seen) == 80 and set(seen.values()) == {40}  # 20 numerals, two fields, two answers


def test_memory_pairs_differ_in_the_state_alone():
    contexts = set()
    for group in in_groups(tasks.memory(8)):
        rest = {example.prompt[3:] for example in group}
        assert {example.prompt[:3] for example in group} == {"x=0", "x=1"} and len(rest) == 5
        assert Counter(example.prompt[3:] for example in group) == {prompt: 2 for prompt in rest}
        contexts |= {tuple(re.findall(r"s\^=(\d)", prompt)) for prompt in rest}
    assert len(contexts) == 128


@pytest.mark.parametrize("m, writes", REGISTER_SETS)
def test_register_groups_are_a_schedule_its_complement_and_every_query(m, writes):
    for group in in_groups(tasks.registers(m, writes)):
        schedules = list(dict.fromkeys(tuple(assignments(example.prompt)) for example in group))
        assert len(schedules) == 2
        assert all(
            name == other and {value, flipped} == {"0", "1"}
            for (name, value), (other, flipped) in zip(*schedules, strict=True)
        )
        bodies = Counter(re.sub(r"query=r\d", "", example.prompt) for example in group)
        assert list(bodies.values()) == [m, m]
        queries = Counter(
            (tuple(assignments(example.prompt)), example.prompt[-4]) for example in group
        )
        assert queries == {(schedule, str(i)): 1 for schedule in schedules for i in range(m)}


def test_register_schedules_vary():
    for m, writes, part in ((8, 2, 0), (1, 16, 1)):  # registers; values
        firsts = [group[0].prompt for group in in_groups(tasks.registers(m, writes))]
        assert len({tuple(pair[part] for pair in assignments(prompt)) for prompt in firsts}) > 120


# The text to train on


@pytest.mark.parametrize("seed", range(4))
def test_a_schedule_stands_in_one_group(seed):
    """Or one fold would learn what another is tested on: of one register there are few."""
    groups = {}
    for example in tasks.registers(1, 16, seed):
        schedule = example.prompt.split("s=")[0].strip()
        groups.setdefault(schedule, set()).add(example.group)
    assert len(groups) == 2 * 128 and all(len(found) == 1 for found in groups.values())


def test_the_text_is_right_long_enough_and_the_same_every_time(text):
    assert 1.5e6 < len(text) < 4.5e6 and text == tasks.text() != tasks.text(seed=1, n_examples=100)
    assert "".join(sorted(set(text))) == tasks.SYMBOLS
    body, n = "", 0
    for line in text.splitlines():
        if line[:2] in ("S:", "F:", "V:"):
            assert answer(body + line[:2]) == line[2:], body + line
            n += 1
        if line[:2] in ("S:", "F:"):
            body = ""
        elif line[:2] != "V:":
            body += line + "\n"
        if re.match(r"need=|x=", line) or re.match(r"r\d=", line) and "s=" in body:
            body = line + "\n"
    assert n == text.count(":") > 50_000


def test_the_text_holds_short_and_long_examples_of_every_kind(text):
    nulls = {
        ask: Counter(
            found.count("\n")
            for found in re.findall(rf"s=\d\n(?:s\^=\d\n)*((?:s\+=0\n)*){ask}", text)
        )
        for ask in ("S:", "F:", "query")
    }
    for ask in ("S:", "F:"):
        assert (
            nulls[ask][0] > 1000
            and sum(nulls[ask][n] for n in range(65, 129)) > 100
            and max(nulls[ask]) == 128
        )
    assert max(nulls["query"]) == 7 and nulls["query"][7] > 50
    schedules = [found.split() for found in registers_asked(text)]
    for m in (1, 2, 4, 8):
        lengths = Counter(
            len(found) for found in schedules if len({line[:2] for line in found}) == m
        )
        assert (
            lengths[m] > 500 and sum(lengths[n] for n in range(48, 65)) > 30 and max(lengths) == 64
        )
    assert "\n" * 90 + "r" in text


@pytest.mark.parametrize("seed", (0, 1))
def test_no_probe_group_occurs_in_the_text(text, seed):
    trained = {frozenset(pair) for pair in re.findall(r"need=(\d\d)\ndone=(\d\d)\n", text)}
    probed = {
        numeral
        for example in tasks.completion(0, seed)
        for numeral in re.findall(r"=(\d\d)", example.prompt)
    }
    assert len(trained) > 2000 and len(probed) == 20 and not set().union(*trained) & probed

    trained = set(re.findall(r"(?:s\^=\d\n){8}", text))
    probed = {
        re.findall(r"(?:s\^=\d\n){8}", example.prompt)[0] for example in tasks.memory(0, seed)
    }
    assert len(trained) > 50 and len(probed) == 128 and not trained & probed

    trained = set(registers_asked(text))
    for m, writes in REGISTER_SETS:
        probed = {
            registers_asked(example.prompt)[0] for example in tasks.registers(m, writes, seed)
        }
        assert len(probed) > 250 and not trained & probed
    long = [found for found in trained if found.count("\n") >= 16]
    assert len(long) > 500


def test_a_schedule_is_held_out_together_with_its_complement_or_not_at_all():
    draw = random.Random(1)
    kinds = [
        {tuple(tasks.random_schedule(draw, 1, 16, for_probe)) for _ in range(3000)}
        for for_probe in (True, False)
    ]
    assert (
        min(len(schedules) for schedules in kinds) > 2500
    )  # of 65,536: without a rule, more than 100 were in both
    complements = {tuple((r, 1 - value) for r, value in schedule) for schedule in kinds[0]}
    assert not (kinds[0] | complements) & kinds[1]


def test_answers_in_the_text_are_balanced(text):
    for ask, answers in (("S", "dm"), ("F", "01"), ("V", "01")):
        counts = Counter(re.findall(rf"^{ask}:(.)$", text, flags=re.MULTILINE))
        assert set(counts) == set(answers) and abs(counts[answers[0]] / counts.total() - 0.5) < 0.02
