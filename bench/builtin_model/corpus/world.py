# ruff: noqa: E501 (tables of sentences read best on long lines)
"""Questions and answers about a simple world: animals, colors, opposites, calendar, counting, uses, capitals, sizes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import NamedTuple

from bench.builtin_model.corpus.items import Item, article, ask, facts, invented, sentence, wording


class Animal(NamedTuple):
    """An animal and what sentences say about it. ``home`` includes the preposition, ``young`` is what its young are
    called."""

    name: str
    sound: str
    home: str
    eats: str
    legs: int
    colour: str
    young: str


def _animal(row: str) -> Animal:
    name, sound, home, eats, legs, colour, young = (part.strip() for part in row.split("|"))
    return Animal(name, sound, home, eats, int(legs), colour, young)


ANIMALS = tuple(
    _animal(row)
    for row in (
        "dog | barks | in a house | meat | 4 | brown | puppy",
        "cat | meows | in a house | mice | 4 | grey | kitten",
        "cow | moos | on a farm | grass | 4 | brown | calf",
        "sheep | bleats | on a farm | grass | 4 | white | lamb",
        "horse | neighs | in a stable | hay | 4 | brown | foal",
        "duck | quacks | on a pond | water plants | 2 | white | duckling",
        "hen | clucks | in a coop | corn | 2 | brown | chick",
        "pig | grunts | on a farm | roots | 4 | pink | piglet",
        "lion | roars | in the savanna | meat | 4 | yellow | cub",
        "wolf | howls | in the forest | meat | 4 | grey | pup",
        "frog | croaks | in a pond | flies | 4 | green | tadpole",
        "bee | buzzes | in a hive | nectar | 6 | yellow | larva",
        "owl | hoots | in a tree | mice | 2 | brown | owlet",
        "mouse | squeaks | in a hole | seeds | 4 | grey | pup",
        "snake | hisses | in the grass | mice | 0 | green | hatchling",
        "crow | caws | in a tree | worms | 2 | black | chick",
        "bear | growls | in a cave | berries | 4 | brown | cub",
        "goat | bleats | on a hill | leaves | 4 | white | kid",
        "elephant | trumpets | in the savanna | leaves | 4 | grey | calf",
        "monkey | chatters | in the jungle | fruit | 4 | brown | infant",
        "fox | yelps | in a den | rabbits | 4 | red | kit",
        "rabbit | squeaks | in a burrow | carrots | 4 | white | kit",
        "spider | makes no sound | in a web | flies | 8 | black | spiderling",
        "ant | makes no sound | in an anthill | seeds | 6 | black | larva",
        "whale | sings | in the ocean | krill | 0 | blue | calf",
        "fish | makes no sound | in the water | water plants | 0 | silver | fry",
        "penguin | honks | on the ice | fish | 2 | black and white | chick",
        "camel | grunts | in the desert | dry plants | 4 | yellow | calf",
        "squirrel | chatters | in a tree | nuts | 4 | red | kit",
        "deer | bellows | in the forest | grass | 4 | brown | fawn",
    )
)
COLOURS = {
    "the sky": "blue", "grass": "green", "snow": "white", "coal": "black", "a lemon": "yellow", "blood": "red", "a carrot": "orange",
    "a strawberry": "red", "milk": "white", "the sun": "yellow", "a tomato": "red", "chocolate": "brown", "a cucumber": "green",
    "the night": "black", "a banana": "yellow", "the ocean": "blue", "a leaf": "green", "an orange": "orange", "a cherry": "red",
    "salt": "white", "a pea": "green", "a plum": "purple", "a flamingo": "pink", "wood": "brown", "ash": "grey", "gold": "yellow",
    "a pumpkin": "orange", "an elephant": "grey", "lavender": "purple", "a fire engine": "red",
}  # fmt: skip
OPPOSITES = tuple(
    tuple(pair.split("-")) for pair in (
        "hot-cold big-small tall-short fast-slow happy-sad day-night up-down open-closed full-empty hard-soft light-dark new-old "
        "clean-dirty wet-dry early-late good-bad left-right rich-poor loud-quiet strong-weak high-low near-far thick-thin "
        "inside-outside first-last alive-dead easy-difficult true-false sweet-bitter smooth-rough sharp-blunt wide-narrow "
        "safe-dangerous wild-tame begin-end push-pull give-take buy-sell win-lose love-hate laugh-cry always-never more-less"
    ).split()
)  # fmt: skip
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
)  # fmt: skip
SEASONS = ("spring", "summer", "autumn", "winter")
USES = {
    "a knife": "cutting", "a pen": "writing", "a cup": "drinking", "a bed": "sleeping", "a key": "opening doors", "a lamp": "giving light",
    "a broom": "sweeping the floor", "an umbrella": "keeping dry in the rain", "a clock": "telling the time", "soap": "washing",
    "a chair": "sitting", "a boat": "crossing water", "a hammer": "driving nails", "a spoon": "eating soup", "a map": "finding the way",
    "a needle": "sewing", "a shovel": "digging", "a towel": "drying", "a book": "reading", "an oven": "baking", "a fridge": "keeping food cold",
    "a bridge": "crossing a river", "a ladder": "climbing up high", "a coat": "keeping warm", "a ball": "playing", "scissors": "cutting paper",
    "a telescope": "looking at the stars", "a thermometer": "measuring heat", "a bell": "ringing", "a comb": "combing hair",
    "glasses": "seeing better", "a bag": "carrying things", "a candle": "giving light", "a bicycle": "riding", "a rope": "tying things",
    "a scale": "weighing things",
}  # fmt: skip
CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Portugal": "Lisbon", "Austria": "Vienna",
    "Norway": "Oslo", "Ireland": "Dublin", "Greece": "Athens", "Egypt": "Cairo", "Japan": "Tokyo", "Peru": "Lima", "Kenya": "Nairobi",
    "Cuba": "Havana", "Poland": "Warsaw", "Hungary": "Budapest", "Finland": "Helsinki", "Sweden": "Stockholm", "Denmark": "Copenhagen",
    "Belgium": "Brussels", "China": "Beijing", "England": "London", "Chile": "Santiago", "Canada": "Ottawa", "India": "New Delhi",
}  # fmt: skip
SIZES = (
    "ant", "bee", "mouse", "frog", "hen", "cat", "fox", "dog", "goat", "wolf", "pig", "deer", "lion", "cow", "horse", "camel",
    "elephant", "whale",
)  # fmt: skip
NUMBERS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen "
    "nineteen twenty"
).split()
_PLACES = {place.split()[-1] for place in (animal.home for animal in ANIMALS)}
_CORE = ("{q}", "{q}", "{q}", "Please tell me: {q}", "I have a question: {q}", "Do you know this? {q}", "Tell me, {l}", "Hey, {l}",
         "Can you help me? {q}", "Quick question: {l}", "So, {l}", "{l}", "A question about the world: {q}", "Hello! {q}", "Hi, {l}")  # fmt: skip


def draw(rng: Random) -> Item:
    """Draw an item of this skill."""
    return rng.choices(_TOPICS, _WEIGHTS)[0](rng)


def _item(rng: Random, questions: str, answer: str, accept: list[str], reject: Sequence[str] = ()) -> Item:
    """Make an item of one of the ``questions`` (wordings separated by ``|``), sometimes with an introduction."""
    question = sentence(rng.choice(questions.split("|")).strip())
    lower = question if question.startswith(("I ", *DAYS, *MONTHS, *CAPITALS)) else question[0].lower() + question[1:]
    asked = rng.choice(_CORE).format(q=question, l=lower)
    if rng.random() < 0.1:
        asked = asked.rstrip("?.")
    return ask("world", wording(asked), asked, answer, facts(accept, reject))


def _others(words: Iterable[object], right: str) -> list[str]:
    """Return regular expressions that match the wrong values."""
    return [rf"\b{re.escape(str(word))}\b" for word in sorted(set(map(str, words))) if str(word) not in right]


def _sound(rng: Random) -> Item:
    it = rng.choice(ANIMALS)
    the = article(it.name)
    return _item(
        rng,
        f"What sound does {the} make?|What does {the} say?|How does {the} sound?|What noise does {the} make?|Which sound comes from {the}?"
        f"|What do you hear from {the}?|Tell me the sound of {the}.|What kind of sound does the {it.name} make?",
        f"{sentence(the)} {it.sound}.",
        [rf"{it.name} {it.sound}"],
        _others((each.sound for each in ANIMALS), it.sound),
    )


def _home(rng: Random) -> Item:
    it = rng.choice(ANIMALS)
    the = article(it.name)
    return _item(
        rng,
        f"Where does {the} live?|Where do you find {the}?|What is the home of {the}?|Where is {the} at home?|In which place does {the} live?"
        f"|Where would I look for {the}?|Where can I see {the}?|Tell me where {the} lives.",
        f"{sentence(the)} lives {it.home}.",
        [rf"lives {it.home}"],
        _others(_PLACES, it.home),
    )


def _food(rng: Random) -> Item:
    it = rng.choice(ANIMALS)
    the = article(it.name)
    return _item(
        rng,
        f"What does {the} eat?|What is the food of {the}?|What do I feed {the}?|What does {the} like to eat?|Which food does {the} eat?"
        f"|What should I give {the} to eat?|Tell me what {the} eats.|What is on the menu of {the}?",
        f"{sentence(the)} eats {it.eats}.",
        [rf"eats {it.eats}"],
        _others((each.eats for each in ANIMALS), it.eats + it.name),
    )


def _legs(rng: Random) -> Item:
    it = rng.choice(ANIMALS)
    the, count = article(it.name), NUMBERS[it.legs] if it.legs else "no"
    return _item(
        rng,
        f"How many legs does {the} have?|How many legs has {the} got?|What number of legs does {the} have?|Count the legs of {the}."
        f"|On how many legs does {the} walk?|Tell me how many legs {the} has.|Does {the} have legs, and how many?",
        f"{sentence(the)} has {count} legs.",
        [rf"has {count} legs", rf"has {it.legs} legs"],
        _others(("no", "two", "four", "six", "eight"), count),
    )


def _young(rng: Random) -> Item:
    it = rng.choice(ANIMALS)
    return _item(
        rng,
        f"What is a young {it.name} called?|What do you call a baby {it.name}?|What is the name for a young {it.name}?"
        f"|How do you call the young of {article(it.name)}?|A baby {it.name} is called what?|What is the word for a baby {it.name}?"
        f"|What is the baby of {article(it.name)} called?",
        f"A young {it.name} is called {article(it.young)}.",
        [rf"called an? {it.young}\b"],
        _others((each.young for each in ANIMALS), it.young),
    )


def _colour(rng: Random) -> Item:
    if rng.random() < 0.3:
        it = rng.choice(ANIMALS)
        thing, colour = article(it.name), it.colour
        if thing in COLOURS:
            colour = COLOURS[thing]
    else:
        thing, colour = rng.choice(sorted(COLOURS.items()))
    return _item(
        rng,
        f"What colour is {thing}?|What is the colour of {thing}?|Which colour does {thing} have?|Tell me the colour of {thing}."
        f"|What color is {thing}?|Of what colour is {thing}?|What colour would you paint {thing}?|Which color has {thing}?"
        f"|What does {thing} look like, which colour?|In which colour do I draw {thing}?",
        f"{sentence(thing)} is {colour}.",
        [rf"{thing} is {colour}\."],
        [] if thing == "an orange" else _others(set(COLOURS.values()), colour + thing),
    )


def _opposite(rng: Random) -> Item:
    pair = rng.choice(OPPOSITES)
    a, b = pair if rng.random() < 0.5 else pair[::-1]
    return _item(
        rng,
        f"What is the opposite of {a}?|What is the contrary of {a}?|Opposite of {a}?|Which word means the opposite of {a}?"
        f"|Give me the opposite of {a}.|Name the opposite of {a}.|What do you call the opposite of {a}?|If it is not {a}, what is the opposite?"
        f'|What is the opposite of the word "{a}"?|Which word is the contrary of {a}?',
        f"The opposite of {a} is {b}.",
        [rf"opposite of {a} is {b}\b"],
    )


def _calendar(rng: Random) -> Item:
    names, kind = rng.choice(((DAYS, "day"), (DAYS, "day"), (MONTHS, "month"), (MONTHS, "month"), (SEASONS, "season")))
    at, after = rng.randrange(len(names)), rng.random() < 0.5
    here, there = names[at], names[(at + (1 if after else -1)) % len(names)]
    if after:
        questions = (
            f"Which {kind} comes after {here}?|What {kind} comes after {here}?|What follows {here}?|What is the {kind} after {here}?"
            f"|After {here} comes which {kind}?|Name the {kind} after {here}.|What comes next after {here}?|Which {kind} follows {here}?"
        )
        answer = f"After {here} comes {there}."
    else:
        questions = (
            f"Which {kind} comes before {here}?|What {kind} comes before {here}?|What is the {kind} before {here}?"
            f"|Before {here} comes which {kind}?|Name the {kind} before {here}.|Which {kind} is just before {here}?|What comes right before {here}?"
        )
        answer = f"Before {here} comes {there}."
    return _item(rng, questions, answer, [answer.rstrip(".")], _others(names, here + there))


def _totals(rng: Random) -> Item:
    what, per, count = rng.choice(
        (("days", "a week", "seven"), ("months", "a year", "twelve"), ("seasons", "a year", "four"), ("hours", "a day", "twenty-four"),
         ("minutes", "an hour", "sixty"), ("seconds", "a minute", "sixty"), ("legs", "a table", "four"), ("wheels", "a car", "four"),
         ("wheels", "a bicycle", "two"), ("fingers", "a hand", "five"), ("sides", "a triangle", "three"), ("corners", "a square", "four"))
    )  # fmt: skip
    verb = "has"
    return _item(
        rng,
        f"How many {what} does {per} have?|How many {what} are in {per}?|How many {what} has {per}?|What number of {what} does {per} have?"
        f"|Tell me how many {what} {per} has.|Count the {what} of {per}.|How many {what} make {per}?",
        f"{sentence(per)} {verb} {count} {what}.",
        [rf"{per} has {count} {what}"],
    )


def _counting(rng: Random) -> Item:
    pick = rng.random()
    if pick < 0.35:
        start = rng.randrange(0, 40)
        end = start + rng.randint(2, 9)
        run = [str(number) for number in range(start, end + 1)]
        questions = f"Count from {start} to {end}.|Please count from {start} to {end}.|Can you count from {start} up to {end}?|Start at {start} and count to {end}."
        if rng.random() < 0.3:
            run = run[::-1]
            questions = f"Count down from {end} to {start}.|Count backwards from {end} to {start}.|Please count down from {end} to {start}."
        answer = ", ".join(run) + "."
        return _item(rng, questions, answer, [f"(?<![0-9]){', '.join(run)}(?![0-9,])"])
    number, after = rng.randrange(1, 999), rng.random() < 0.5
    there = number + 1 if after else number - 1
    word = "after" if after else "before"
    return _item(
        rng,
        f"Which number comes {word} {number}?|What number comes {word} {number}?|What is the number {word} {number}?|Name the number {word} {number}.",
        f"{word.capitalize()} {number} comes {there}.",
        [rf"{word} {number} comes {there}\b"],
    )


def _use(rng: Random) -> Item:
    thing, use = rng.choice(sorted(USES.items()))
    plural = thing in ("scissors", "glasses")
    is_, does = ("are", "do") if plural else ("is", "does")
    it = "they" if plural else "it"
    return _item(
        rng,
        f"What {is_} {thing} for?|What do you use {thing} for?|What {is_} {thing} used for?|What can I do with {thing}?|Why do people have {thing}?"
        f"|What {is_} the use of {thing}?|What {does} one need {thing} for?|What {is_} {thing} good for?|Tell me what {thing} {is_} for.",
        f"{sentence(thing)} {is_} for {use}.",
        [rf"{thing} {is_} for {use}", rf"^{it} {is_} for {use}"],
    )  # fmt: skip


def _capital(rng: Random) -> Item:
    country, capital = rng.choice(sorted(CAPITALS.items()))
    if rng.random() < 0.25:
        return _item(
            rng,
            f"{capital} is the capital of which country?|Of which country is {capital} the capital?|Which country has the capital {capital}?"
            f"|Whose capital is {capital}?",
            f"{capital} is the capital of {country}.",
            [rf"{capital} is the capital of {country}"],
            _others(CAPITALS, country),
        )
    return _item(
        rng,
        f"What is the capital of {country}?|Which city is the capital of {country}?|Name the capital of {country}.|Tell me the capital of {country}."
        f"|What is {country}'s capital?|Capital of {country}?|Which is the capital city of {country}?|What do you call the capital of {country}?",
        f"The capital of {country} is {capital}.",
        [rf"capital of {country} is {capital}"],
        _others(CAPITALS.values(), capital),
    )


def _size(rng: Random) -> Item:
    small, large = sorted(rng.sample(range(len(SIZES)), 2))
    a, b = (small, large) if rng.random() < 0.5 else (large, small)
    one, two = SIZES[a], SIZES[b]
    bigger = rng.random() < 0.6
    winner, loser = (SIZES[large], SIZES[small]) if bigger else (SIZES[small], SIZES[large])
    word = "bigger" if bigger else "smaller"
    return _item(
        rng,
        f"What is {word}, {article(one)} or {article(two)}?|Which is {word}: {article(one)} or {article(two)}?"
        f"|Who is {word}, the {one} or the {two}?|Is {article(one)} or {article(two)} {word}?",
        f"{sentence(article(winner))} is {word} than {article(loser)}.",
        [rf"{winner} is {word} than an? {loser}"],
    )


def _unknown(rng: Random) -> Item:
    """Draw a question about an invented word; the right answer is that the model does not know it."""
    word = invented(rng, rng.choice((2, 3)))
    thing = rng.choice((word.lower(), word))
    return _item(
        rng,
        f"What is {article(thing.lower())}?|Who is {word}?|Where is {word}?|What does {thing} mean?|How old is {word}?|Why is {word} famous?"
        f"|When was {word} built?|Who invented {thing}?|How far is it to {word}?|Tell me about {word}.",
        f"I do not know {word if thing == word else thing}. I am a very small model and know only a few simple things.",
        ["I do not know"],
    )


_TOPICS: tuple[Callable[[Random], Item], ...] = (
    _sound, _home, _food, _legs, _young, _colour, _opposite, _calendar, _totals, _counting, _use, _capital, _size, _unknown,
)  # fmt: skip
_WEIGHTS = (2, 2, 2, 2, 2, 3, 3, 3, 1, 2, 3, 3, 2, 1)
