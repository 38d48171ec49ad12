"""Three tasks, as text, whose answer is a state that the prompt builds up.

They follow the paper's section on what the states hold.

    completion                  memory                      registers
    need=42                     x=1         the state       r4=0        assignments, random order
    done=19                     s=3         the context:    r0=1
    s=7                         s^=1        8 of these      ...
    s+=0        distractors     ...                         s=7         8 null updates: this one
    ...                         s+=0        distractors     s+=0        and seven of these
    S:m                         ...                         query=r0
                                F:1                         V:1         the latest value

An answer is one character after a colon: `d` (done, the numerals are equal) or `m` (more), else `0`
or `1`. A character is a token, and the last four of a register prompt are digit, newline, letter
and colon.

A probe set comes in groups, each balanced: every prompt has its counterparts with the other answer.
`text` makes the text to train on, from other groups: other numerals (in every place where equality
is asked), other contexts of eight updates, other schedules of assignments; these rules hold for
every seed. The text is meant to be learnt by a small model: most of its examples are short, with
few distractors, registers and assignments, and a schedule is followed by a query of each of its
registers. Long ones, up to the longest probe, and the padding with newlines occur as well.
"""

import random
import zlib
from dataclasses import dataclass

DISTRACTORS = (0, 8, 32, 128)
REGISTERS = (1, 2, 4, 8)  # with 16 assignments in all
WRITES = (2, 4, 8)  # of each of 8 registers
SYMBOLS = "\n+0123456789:=FSV^demnoqrsuxy"
NULL = "s+=0\n"
CONTEXT = 8  # updates between the state of `memory` and the distractors
FOLDS = 4  # of cross-validation
NUMERALS = [f"{n:02}" for n in range(100)]
PROBED = [n for n in NUMERALS if (int(n[0]) + int(n[1])) % 5 == 0]  # 20: each digit twice per place
TRAINED = [n for n in NUMERALS if n not in PROBED]
Schedule = list[tuple[int, int]]  # (register, value) of each assignment


@dataclass(frozen=True)
class Example:
    """A prompt that ends in a colon, the character that answers it, and where it stands.

    group: examples that are each other's counterparts; they stay together in cross-validation.
    folds: those whose material it holds. A probe of fold f learns from the examples that do not
    hold f and is tested on those that hold f alone.
    """

    prompt: str
    answer: str
    group: int
    folds: tuple[int, ...]


# Prompts


def completion_prompt(need: str, done: str, scratch: int, distractors: int) -> str:
    return f"need={need}\ndone={done}\ns={scratch}\n{NULL * distractors}S:"


def memory_prompt(state: int, scratch: int, bits: list[int], distractors: int) -> str:
    context = "".join(f"s^={bit}\n" for bit in bits)
    return f"x={state}\ns={scratch}\n{context}{NULL * distractors}F:"


def schedule_prompt(schedule: Schedule, scratch: int, nulls: int) -> str:
    """A register prompt without its query; the scratch's own assignment counts as a null update."""
    assignments = "".join(f"r{r}={value}\n" for r, value in schedule)
    return f"{assignments}s={scratch}\n{NULL * (nulls - 1)}"


def query_prompt(register: int) -> str:
    return f"query=r{register}\nV:"


def completion(distractors: int, seed: int = 0) -> list[Example]:
    """1,600 examples of 22 + 5 distractors characters: 80 pairs {a, b} of numerals, 20 of each.

    A group has the assignments (a, a), (a, b), (b, a), (b, b), each after the same 5 starts of the
    scratch. Each of the 20 numerals is in 8 pairs, so it is 40 times in each field with each
    answer. As in the paper, (a, a) is in each of a's 8 groups: a probe that could remember prompts
    would do well on held-out groups without comparing. So, which is this project's choice, folds
    go by numerals, five each: a numeral of a test prompt is in no prompt of the training part. 40
    of the pairs lie within a fold and are tested, the others serve training alone.
    """
    rng = random.Random(f"completion {seed}")
    ring = rng.sample(PROBED, len(PROBED))
    per_fold = len(ring) // FOLDS
    examples = []
    for group, (i, j) in enumerate(ring_pairs()):
        a = ring[i]
        b = ring[j]
        folds = tuple(sorted({i // per_fold, j // per_fold}))
        for scratch in rng.sample(range(10), 5):
            for need, done in ((a, a), (a, b), (b, a), (b, b)):
                prompt = completion_prompt(need, done, scratch, distractors)
                answer = "d" if need == done else "m"
                examples.append(Example(prompt, answer, group, folds))
    return examples


def ring_pairs() -> list[tuple[int, int]]:
    """The 80 pairs of places on a ring of 20 that are at most four apart, from all folds in turn.

    A fold is an arc of five places, so that each two of its places are a pair.
    """
    n = len(PROBED)
    per_fold = n // FOLDS
    pairs = []
    for apart in (1, 2, 3, 4):
        for place in range(per_fold):
            for fold in range(FOLDS):
                i = fold * per_fold + place
                pairs.append((i, (i + apart) % n))
    return pairs


def memory(distractors: int, seed: int = 0) -> list[Example]:
    """1,280 examples of 50 + 5 distractors characters: 128 contexts, 10 per group.

    The contexts are all those of eight binary updates with an even number of ones; a group has both
    states, each with the same 5 starts of the scratch.
    """
    rng = random.Random(f"memory {seed}")
    even = [code for code in range(2**CONTEXT) if code.bit_count() % 2 == 0]
    examples = []
    for group, code in enumerate(rng.sample(even, len(even))):
        bits = [code >> i & 1 for i in range(CONTEXT)]
        for scratch in rng.sample(range(10), 5):
            for state in (0, 1):
                prompt = memory_prompt(state, scratch, bits, distractors)
                examples.append(Example(prompt, str(state), group, (group % FOLDS,)))
    return examples


def registers(n_registers: int, writes: int, seed: int = 0) -> list[Example]:
    """256 n_registers examples of 84 + 6 assignments characters: 128 schedules, groups of 2 each.

    A schedule assigns each register a random value `writes` times, in random order. A group has the
    schedule and its bitwise complement, with a query of every register: 2 n_registers examples.
    Newlines in front make all prompts equally long.
    """
    rng = random.Random(f"registers {n_registers} {writes} {seed}")
    examples = []
    seen = set()  # a schedule, or its complement, is in one group alone, and so in one fold
    for group in range(128):
        while True:
            schedule = random_schedule(rng, n_registers, n_registers * writes, for_probe=True)
            up_to_complement = tuple((r, value ^ schedule[0][1]) for r, value in schedule)
            if up_to_complement not in seen:
                break
        seen.add(up_to_complement)
        scratch = rng.randrange(10)
        length = 84 + 6 * len(schedule)
        for flip in (0, 1):
            flipped = [(r, value ^ flip) for r, value in schedule]
            latest = dict(flipped)
            body = schedule_prompt(flipped, scratch, nulls=8)
            for r in range(n_registers):
                prompt = (body + query_prompt(r)).rjust(length, "\n")
                examples.append(Example(prompt, str(latest[r]), group, (group % FOLDS,)))
    return examples


def probe_sets(seed: int = 0, n_groups: int | None = None) -> dict[tuple[str, int], list[Example]]:
    """(task, its distractors, registers or writes) -> examples, of the first n_groups.

    `writes` has 8 registers.
    """
    sets = {("completion", n): completion(n, seed) for n in DISTRACTORS}
    sets |= {("memory", n): memory(n, seed) for n in DISTRACTORS}
    sets |= {("registers", n): registers(n, 16 // n, seed) for n in REGISTERS}
    sets |= {("writes", n): registers(8, n, seed) for n in WRITES}
    if n_groups is not None:
        for name, examples in sets.items():
            sets[name] = [example for example in examples if example.group < n_groups]
    return sets


def random_schedule(
    rng: random.Random, n_registers: int, n_assignments: int, for_probe: bool
) -> Schedule:
    """Every register assigned as often as any other, or once more, in random order.

    One of those held out if for_probe, else one of the others.
    """
    while True:
        order = [i % n_registers for i in range(n_assignments)]
        rng.shuffle(order)
        schedule = [(register, rng.randrange(2)) for register in order]
        if held_out(schedule) == for_probe:
            return schedule


def held_out(schedule: Schedule) -> bool:
    """Whether a schedule is a probe's: a quarter of all long ones, each with its complement."""
    if len(schedule) < 16:
        return False
    first = schedule[0][1]
    code = bytes(2 * register + (value ^ first) for register, value in schedule)
    return zlib.crc32(code) % 4 == 0


# The text to train on


def text(seed: int = 0, n_examples: int = 50_000) -> str:
    """Examples with their answers and a line break after each, alike from beginning to end."""
    rng = random.Random(f"text {seed}")
    makers = (completion_text, memory_text, registers_text)
    kinds = rng.choices(makers, (5, 2, 3), k=n_examples)
    return "".join(make(rng) for make in kinds)


def random_count(rng: random.Random, least: int, most: int) -> int:
    """How many of something: mostly `least` or up to two more, else anything up to `most`.

    In the second case the logarithm is uniform, so that smaller counts come more often.
    """
    if rng.random() < 0.85:
        return rng.randint(least, least + 2)
    return least - 1 + int((most + 2 - least) ** rng.random())


def completion_text(rng: random.Random) -> str:
    need, other = rng.sample(TRAINED, 2)
    done = rng.choice((need, other))
    scratch = rng.randrange(10)
    prompt = completion_prompt(need, done, scratch, random_count(rng, 0, max(DISTRACTORS)))
    return prompt + ("d\n" if need == done else "m\n")


def memory_text(rng: random.Random) -> str:
    state = rng.randrange(2)
    bits = [rng.randrange(2) for _ in range(rng.randint(0, CONTEXT))]
    if len(bits) == CONTEXT and sum(bits) % 2 == 0:
        bits[0] ^= 1  # the even ones are the probe's
    scratch = rng.randrange(10)
    prompt = memory_prompt(state, scratch, bits, random_count(rng, 0, max(DISTRACTORS)))
    return f"{prompt}{state}\n"


def registers_text(rng: random.Random) -> str:
    n_registers = rng.choice(REGISTERS)
    n_assignments = random_count(rng, n_registers, 64)
    schedule = random_schedule(rng, n_registers, n_assignments, for_probe=False)
    latest = dict(schedule)
    queries = ""
    for register in rng.sample(range(n_registers), n_registers):
        queries += f"{query_prompt(register)}{latest[register]}\n"
    padding = "\n" * (rng.randrange(100) if rng.random() < 0.1 else 0)
    scratch = rng.randrange(10)
    return padding + schedule_prompt(schedule, scratch, random_count(rng, 1, 8)) + queries
