# ruff: noqa: E501 (tables of sentences read best on long lines)
"""Short stories from two grammars: a hero, a place, a wish, trouble, a friend, an ending."""

from __future__ import annotations

from random import Random

from bench.builtin_model.corpus.items import Item, article, ask, person

HEROES = (
    "fox", "mouse", "bear", "rabbit", "cat", "dog", "owl", "frog", "duck", "hen", "goat", "horse", "lion", "penguin", "squirrel",
    "deer", "pig", "wolf", "monkey", "whale", "robot", "dragon", "king", "queen", "farmer", "baker", "sailor", "girl", "boy", "knight",
)  # fmt: skip
_TRAITS = ("small", "brave", "shy", "clever", "kind", "lazy", "curious", "young", "old", "happy", "lonely", "quiet")
_PLACES = (
    "in a green forest", "by a blue lake", "in a small village", "on a high hill", "near the sea", "in an old castle", "on a quiet farm",
    "in a deep valley", "in a house at the end of the road", "on a little island",
)  # fmt: skip
_THINGS = (
    "red kite", "golden key", "round stone", "silver bell", "warm coat", "little boat", "blue lamp", "sweet pear", "shiny shell",
    "old map", "wooden spoon", "yellow ball", "white feather", "big umbrella",
)  # fmt: skip
_WISHES = (
    "see the sea", "find a friend", "fly like a bird", "learn to sing", "climb the highest hill", "bake the best bread", "build a house",
    "grow a garden", "count the stars", "cross the wide river",
)  # fmt: skip
_WEATHER = (
    "it rained all day",
    "the wind was cold",
    "the sun was warm",
    "snow lay on the ground",
    "the fog was thick",
    "the sky was clear",
)
_TROUBLE = (
    "fell into the water", "rolled down the hill", "was lost in the dark", "was stuck under a stone", "hung in a high tree",
    "was gone in the morning", "broke into two pieces",
)  # fmt: skip
_MOODS = (
    ("sad", "cried a little"),
    ("worried", "did not know what to do"),
    ("tired", "sat down under a tree"),
    ("afraid", "called for help"),
)
_HELP = (
    "had a long rope", "knew the way", "was very strong", "had a good idea", "was not afraid of anything", "could see in the dark",
    "had seen this before",
)  # fmt: skip
_ENDS = (
    "From that day on they were best friends.", "They laughed and shared a warm supper.", "And they talked about it for many years.",
    "Then they walked home together under the stars.", "That night everybody slept well.", "And so the day had a good end.",
)  # fmt: skip
_LESSONS = (
    "It is good to have a friend.", "Small steps lead far.", "Asking for help is brave.", "Good things need time.",
    "Together it is easier.", "A kind word costs nothing.",
)  # fmt: skip
_ASK = (
    "Tell me a story about {a}.", "Write a short story about {a}.", "Can you tell me a story about {a}?", "I want a story about {a}.",
    "Please tell a story with {a} in it.", "A story about {a}, please.", "Tell me about {a}, as a story.", "Make up a story about {a}.",
    "Do you know a story about {a}?", "Tell a short tale about {a}.", "Read me a bedtime story about {a}.",
)  # fmt: skip
_ASK_NAME = (
    "Tell me a story about {a} called {n}.", "Write a short story about {a} named {n}.", "I want a story about {n} the {h}.",
    "Please tell a story about {n}, {a}.", "Make up a story about {a} with the name {n}.",
)  # fmt: skip
_ASK_ANY = (
    "Tell me a story.",
    "Can you tell me a story?",
    "I would like a short story.",
    "Write a story.",
    "Tell me something nice before I sleep.",
)
_PRONOUNS = {
    "king": "he",
    "queen": "she",
    "girl": "she",
    "boy": "he",
    "knight": "he",
    "sailor": "he",
    "farmer": "she",
    "baker": "he",
}


def draw(rng: Random) -> Item:
    """Draw an item of this skill."""
    hero, trait, name = rng.choice(HEROES), rng.choice(_TRAITS), person(rng)
    thing, wish, friend = rng.choice(_THINGS), rng.choice(_WISHES), rng.choice(HEROES)
    while friend == hero:
        friend = rng.choice(HEROES)
    text = (_lost if rng.random() < 0.5 else _wished)(rng, hero, trait, name, thing, wish, friend)
    pick = rng.random()
    if pick < 0.6:
        question, must = rng.choice(_ASK).format(a=article(hero)), [hero]
    elif pick < 0.9:
        question, must = rng.choice(_ASK_NAME).format(a=article(hero), h=hero, n=name), [hero, name]
    else:
        question, must = rng.choice(_ASK_ANY), []
    return ask("stories", f"{hero} {trait} {name}", question, text, {"kind": "story", "must": must})


def _opening(rng: Random, hero: str, trait: str, name: str) -> str:
    place = rng.choice(_PLACES)
    who = article(f"{trait} {hero}")
    return rng.choice((
        f"Once upon a time there was {who} called {name}. {name} lived {place}.",
        f"{name} was {who}. {name} lived {place}.",
        f"Once there lived {who} {place}. The name of the {hero} was {name}.",
    ))  # fmt: skip


def _lost(rng: Random, hero: str, trait: str, name: str, thing: str, wish: str, friend: str) -> str:
    he = _PRONOUNS.get(hero, "it")
    mood, act = rng.choice(_MOODS)
    return " ".join((
        _opening(rng, hero, trait, name),
        rng.choice((f"{name} had {article(thing)} and loved it very much.", f"One day {name} found {article(thing)} on the road.")),
        f"One morning {rng.choice(_WEATHER)}, and the {thing} {rng.choice(_TROUBLE)}.",
        f"The {hero} was {mood} and {act}.",
        f"Then {article(friend)} came by. The {friend} {rng.choice(_HELP)}.",
        f'"{rng.choice(("Do not worry", "Do not be sad", "Come with me", "Let us look together"))}," said the {friend}.',
        f"Soon {name} had the {thing} again, and {he} thanked the {friend}.",
        rng.choice(_ENDS),
    ))  # fmt: skip


def _wished(rng: Random, hero: str, trait: str, name: str, thing: str, wish: str, friend: str) -> str:
    he = _PRONOUNS.get(hero, "it")
    return " ".join((
        _opening(rng, hero, trait, name),
        f"Every day {he} dreamed of one thing: to {wish}.",
        rng.choice((f'"You are too {trait} for that," said the others.', f'"That is not easy," said the old {friend}.', '"Why not?" said the wind.')),
        f"But {name} did not give up. {he.capitalize()} took {article(thing)} and went on {rng.choice(('a long way', 'the road', 'a journey'))}.",
        f"On the way {rng.choice(_WEATHER)}. There {he} met {article(friend)}, who {rng.choice(_HELP)}.",
        f"{name} gave the {friend} the {thing}, and the {friend} helped the {hero} to {wish}.",
        f"In the evening {name} was very happy.",
        rng.choice(_LESSONS),
        rng.choice(_ENDS),
    ))  # fmt: skip
