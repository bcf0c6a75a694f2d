"""Writes 171 instructions with answers, the same at every call: something small and sensible to fine-tune on.

    python benchmarks/guide_004_rows.py data/instructions.jsonl

Nine kinds of nineteen rows. Facts and texts are ours; numbers are computed. Rows are Alpaca's: instruction, input,
output.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

Row = dict[str, str]

CAPITALS = """Austria Vienna Danube|Czechia Prague Vltava|Egypt Cairo Nile|France Paris Seine|Germany Berlin Spree|
Hungary Budapest Danube|Iraq Baghdad Tigris|Italy Rome Tiber|Latvia Riga Daugava|Lithuania Vilnius Neris|
Paraguay Asuncion Paraguay|Poland Warsaw Vistula|Portugal Lisbon Tagus|Russia Moscow Moskva|Serbia Belgrade Danube|
Slovakia Bratislava Danube|Spain Madrid Manzanares|Sudan Khartoum Nile|Ukraine Kyiv Dnieper"""

OPPOSITES = """ancient modern|brave timid|broad narrow|calm agitated|cheap expensive|deep shallow|early late|empty full|
gentle harsh|heavy light|humid dry|loud quiet|polite rude|rough smooth|scarce plentiful|sharp blunt|swift slow|
temporary permanent|transparent opaque"""

VERBS = """begin began begun|break broke broken|bring brought brought|choose chose chosen|draw drew drawn|
drive drove driven|eat ate eaten|fall fell fallen|fly flew flown|forget forgot forgotten|give gave given|
grow grew grown|hide hid hidden|know knew known|ride rode ridden|sing sang sung|speak spoke spoken|
take took taken|write wrote written"""

POLITE = """Send me the file.|Could you please send me the file when you have a moment?
You are late again.|I noticed the meeting started without you; is everything all right?
Close the window.|Would you mind closing the window?
This report is wrong.|I think there may be an error in this report; could we look at it together?
Stop talking.|May I ask for a little quiet so that everyone can hear?
Give me a refund.|I would like to ask for a refund, please.
I need this today.|If it is at all possible, I would be grateful to have this today.
You did not answer.|I am not sure whether my last message reached you, so I am writing again.
Move your car.|Could I ask you to move your car? It is blocking the gate.
Explain that again.|I did not quite follow; would you explain that once more?
That is a bad idea.|I see what you are after, but I have some doubts about this plan.
Turn the music down.|Would it be possible to turn the music down a little?
Call me back.|Please give me a call when it suits you.
You forgot the keys.|It seems the keys were left behind; shall I bring them to you?
Do not touch that.|Please be careful with that, it is easily damaged.
Wait outside.|Would you be so kind as to wait outside for a moment?
Your room is a mess.|It would be nice if you could find some time to tidy your room.
Hurry up.|We are a little short of time; could we go faster?
Fix the printer.|The printer seems to be stuck; could you take a look at it, please?"""

TERMS = """compiler|a program that translates source code into instructions a machine can run
photosynthesis|the way plants use light to turn water and carbon dioxide into sugar and oxygen
inflation|a general rise of prices, so that the same money buys less than before
glacier|a large body of ice that forms from snow over many years and moves slowly under its own weight
metaphor|a figure of speech that calls one thing another in order to show what they share
firewall|a guard between two networks that lets through only what its rules allow
erosion|the wearing away of rock and soil by water, wind or ice
census|an official count of all people who live in a country
catalyst|a substance that speeds a reaction up and is still there when it is over
recursion|solving a problem by solving smaller cases of the same problem
tide|the rise and fall of the sea that the pull of the moon and the sun brings about
mortgage|a loan to buy a house, for which the house itself is the security
vaccine|a preparation that teaches the body to recognise a disease before it meets it
sonnet|a poem of fourteen lines with a fixed order of rhymes
backup|a second copy of data, kept elsewhere in case the first is lost
monsoon|a wind that turns with the season and brings heavy rain for part of the year
overfitting|what happens when a model learns its examples by heart and does poorly on new ones
tariff|a tax that a country puts on goods from abroad
pollen|the fine powder by which flowering plants are fertilised"""

PYTHON = """reverses a string named text|text[::-1]|A slice with a step of -1 walks from the end to the start.
counts the words of a string named text|len(text.split())|split() without arguments cuts at any white space.
gives the largest number of a list named numbers|max(numbers)|max() looks at every element once.
sums the squares of a list named numbers|sum(n * n for n in numbers)|The generator makes each square when it is needed.
tells whether n is even|n % 2 == 0|The remainder of an even number is zero.
removes duplicates from a list named items and keeps the order|list(dict.fromkeys(items))|Keys of a dict are unique.
joins a list of strings named words with commas|", ".join(words)|join() belongs to the separator.
reads all lines of an open file named source|source.readlines()|Each line keeps its line break.
gives the last element of a list named items|items[-1]|Negative places count from the end.
turns a string named text into lower case|text.lower()|Strings do not change, so the result is a new one.
swaps two variables a and b|a, b = b, a|The right side is evaluated before anything is assigned.
makes a list of the numbers from 1 to 10|list(range(1, 11))|range() leaves its end out.
sorts a list of strings named names by length|sorted(names, key=len)|The key is computed once for each element.
counts how often x is in a list named items|items.count(x)|count() compares every element with x.
tells whether a key k is in a dict named table|k in table|Looking for a key takes the same time in any dict.
rounds a number named price to two places|round(price, 2)|The result is a number; format it to keep zeros.
makes a dict from two lists named keys and values|dict(zip(keys, values))|zip() pairs what is at the same place.
gives the first three characters of a string named text|text[:3]|A slice never fails, however short the text.
tells whether all of a list named numbers are positive|all(n > 0 for n in numbers)|all() stops at the first no."""

FRUIT = (
    "apple pear plum cherry fig grape lemon mango melon orange papaya peach quince lime banana kiwi date guava olive"
)
PEOPLE = "Anna Ben Carla David Elena Felix Greta Hugo Ines Jonas Karin Leo Mira Nora Oskar Paula Rosa Stefan Tilda"


def table(text: str, lines: bool = False) -> list[list[str]]:
    if lines:
        return [line.split("|") for line in text.splitlines()]
    return [entry.split() for entry in text.replace("\n", "").split("|")]


def article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def row(instruction: str, output: str, given: str = "") -> Row:
    return {"instruction": instruction, "input": given, "output": output}


def rows() -> list[Row]:
    """All of them, the kinds mixed."""
    kinds = [list(kind) for kind in (_capitals(), _lengths(), _problems(), _opposites(), _verbs(), _polite(), _terms(),
                                     _python(), _sorted())]  # fmt: skip
    return [kind[number] for number in range(19) for kind in kinds]


def _capitals() -> Iterator[Row]:
    for country, city, river in table(CAPITALS):
        yield row(
            f"What is the capital of {country}, and which river is it on?",
            f"The capital of {country} is {city}. It lies on the {river}.",
        )


def _lengths() -> Iterator[Row]:
    for number in range(19):
        kilometres = 3 + 7 * number
        miles = kilometres / 1.609344
        yield row(
            f"Convert {kilometres} kilometres to miles, to one decimal place.",
            f"One mile is 1.609 kilometres. {kilometres} divided by 1.609 is about {miles:.1f}, so "
            f"{kilometres} kilometres are {miles:.1f} miles.",
        )


def _problems() -> Iterator[Row]:
    for number, (name, fruit) in enumerate(zip(PEOPLE.split(), FRUIT.split(), strict=True)):
        boxes, each, eaten = 2 + number % 5, 4 + number, 1 + number % 3
        total = boxes * each
        yield row(
            f"{name} buys {boxes} boxes with {each} pieces of fruit each, every one {article(fruit)}, and eats "
            f"{eaten}. How many are left? Show the steps.",
            f"{name} buys {boxes} times {each}, which is {total}. Without the {eaten} that {name} eats, "
            f"{total} - {eaten} = {total - eaten} are left.",
        )


def _opposites() -> Iterator[Row]:
    for word, opposite in table(OPPOSITES):
        yield row(
            "Give the opposite of the word, and use both in one sentence.",
            f"The opposite of {word} is {opposite}. What seems {word} to one person may seem {opposite} to another.",
            word,
        )


def _verbs() -> Iterator[Row]:
    for verb, past, participle in table(VERBS):
        yield row(
            f'What are the past tense and the past participle of the verb "{verb}"?',
            f'The past tense of "{verb}" is "{past}", and its past participle is "{participle}".',
        )


def _polite() -> Iterator[Row]:
    for blunt, polite in table(POLITE, lines=True):
        yield row("Rewrite this so that it sounds polite.", polite, blunt)


def _terms() -> Iterator[Row]:
    for term, meaning in table(TERMS, lines=True):
        yield row(
            f'Explain in one sentence what "{term}" means.', f"{term[0].upper()}{term[1:]} is the word for {meaning}."
        )


def _python() -> Iterator[Row]:
    for task, code, why in table(PYTHON, lines=True):
        yield row(f"Write one line of Python that {task}.", f"{code}\n\n{why}")


def _sorted() -> Iterator[Row]:
    fruit = FRUIT.split()
    for number in range(19):
        chosen = [fruit[(number + 5 * place) % 19] for place in range(5)]
        yield row("Put these words into alphabetical order.", ", ".join(sorted(chosen)), ", ".join(chosen))


def main() -> None:
    path = Path(sys.argv[1])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows()), encoding="utf-8")
    print(f"{len(rows())} rows in {path}")


if __name__ == "__main__":
    main()
