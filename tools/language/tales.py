"""The grammar of the tales: short texts about coloured shapes, whose last sentence follows from the sentences before it.

The colours, shapes and directions of tools/demo/world.py are among the words. The shapes of one tale differ in colour and shape,
so that both words together name exactly one of them.
"""

import json
from dataclasses import dataclass
from pathlib import Path

COLORS = ["red", "green", "blue", "yellow", "purple", "orange"]
SHAPES = ["circle", "square", "triangle", "star"]
OPPOSITE = {"left": "right", "right": "left", "up": "down", "down": "up"}
NUMBERS = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
# Each place has one preposition.
PLACES = {
    "garden": "in", "forest": "in", "valley": "in", "cave": "in", "meadow": "in", "village": "in",
    "river": "by", "mill": "by", "well": "by", "pond": "by",
    "hill": "on", "beach": "on", "island": "on", "bridge": "on",
    "market": "at", "lake": "at", "gate": "at", "tower": "at",
}
THINGS = ["lamp", "drum", "book", "kite", "bell", "cup", "hat", "coat", "rope", "flag", "map", "ball", "flute", "basket",
          "ladder", "mirror", "whistle", "blanket"]
SMALL = ["key", "ring", "coin", "letter", "ticket", "spoon", "candle", "pearl"]
MANY = ["apples", "stones", "shells", "nuts", "plums", "flowers", "feathers", "buttons", "pears", "carrots"]
WORDS = json.loads((Path(__file__).parent / "words.json").read_text())
HIDING = WORDS["hiding"]
ANIMALS = ["bird", "fox", "cat", "snail", "mouse", "frog", "dog", "rabbit", "duck", "horse"]
PAINTED = WORDS["painted"]
TIMES = ["morning", "evening", "day", "afternoon"]
# What happens, what protects one shape, what happens to the other, and the states of the other and the first.
EVENTS = [
    ("Soon it begins to rain.", ["opens an umbrella", "runs under a roof"], ["stays outside", "has no umbrella"], "wet", "dry"),
    ("Then it begins to snow.", ["sits by the fire", "puts on a thick coat"], ["sleeps outside", "has no coat"], "cold", "warm"),
    ("The path is full of mud.", ["walks on the stones", "jumps over the mud"], ["falls into the mud", "slips on the path"],
     "dirty", "clean"),
    ("Supper is on the table.", ["eats two bowls of soup", "takes bread and cheese"], ["comes too late", "does not like soup"],
     "hungry", "full"),
    ("At night there is music.", ["goes to bed early", "sleeps all night"], ["dances until morning", "sings all night"],
     "tired", "awake"),
    ("A loud noise comes from the dark.", ["knows the noise", "hears only an old owl"], ["hides in a corner", "does not know the noise"],
     "afraid", "calm"),
]
DELAYS = ["to pick a flower", "to take a nap", "to drink some water", "to talk with a friend", "to look at the clouds", "to eat lunch"]
OPENINGS = [
    "It is a {warm} {time}.", "One {time} the sun shines on the {place}.", "One {time} there is fog over the {place}.",
    "Long ago the {place} was full of life.", "This is a tale about good friends.", "The {time} is {warm} and quiet.",
]
FILLERS = [
    "A {animal} sits in the grass.", "The wind is {warm}.", "The grass is {soft}.", "Small clouds drift over the {place}.",
    "A {animal} sings a song.", "All is quiet.", "The sky is clear.", "Two bees fly around a {tall} tree.",
    "Far away a bell rings.", "A {animal} runs across the road.", "The water of the {place} shines.",
]
FIELDS = {"warm": ["warm", "cool", "bright", "gentle", "calm"], "tall": ["tall", "old", "round", "dark"], "soft": ["tall", "green", "soft", "wet"],
          "time": TIMES, "animal": ANIMALS, "place": ["river", "lake", "valley", "pond", "meadow"]}


@dataclass(frozen=True)
class Tale:
    """`body` determines `last`, the sentence before "The end."."""

    kind: str
    body: str
    last: str

    @property
    def text(self):
        return f"{self.body} {self.last} The end."


class Writer:
    """Draws the parts of one tale from a random.Random."""

    def __init__(self, rng):
        self.rng = rng
        self.colors, self.shapes = rng.sample(COLORS, 3), rng.sample(SHAPES, 3)

    def pick(self, items, count=None):
        return self.rng.choice(items) if count is None else self.rng.sample(items, count)

    def shuffled(self, items):
        return self.rng.sample(items, len(items))

    def names(self):
        return [f"the {color} {shape}" for color, shape in zip(self.colors, self.shapes)]

    def fill(self, templates):
        fields = {name: self.pick(words) for name, words in FIELDS.items()}
        return self.pick(templates).format(**fields)

    def maybe_filler(self):
        return [self.fill(FILLERS)] if self.rng.random() < 0.4 else []


def amount(number, things):
    return f"{NUMBERS[number]} {things[:-1] if number == 1 else things}"


def at(place):
    return f"{PLACES[place]} the {place}"


def where(w):
    a, b, c = w.names()
    places = w.pick(list(PLACES), 3)
    who = dict(zip((a, b, c), places))
    count = w.pick([2, 3])
    stays = [w.pick(["{} is {}", "{} lives {}", "{} rests {}"]).format(x, at(p)) for x, p in list(who.items())[:count]]
    lost, animal = w.pick([a, b, c][:count]), w.pick(ANIMALS)
    ask = w.pick(["a {} looks for {}", "a {} wants to meet {}", "a {} has a letter for {}"]).format(animal, lost)
    return stays + w.maybe_filler() + [ask], f"the {animal} finds {lost} {at(who[lost])}"


def journey(w):
    a, b, _ = w.names()
    start, goal, home = w.pick(list(PLACES), 3)
    way = w.pick(["it moves {d} and comes to the {g}", "it moves {d} until it sees the {g}", "it turns {d} and walks to the {g}"])
    first = w.shuffled([f"{a} is {at(start)}", f"{b} is {at(home)}"])
    why = w.pick(["{} wants to see the {}", "{} has a friend at the {}", "{} needs water from the {}"]).format(a, goal)
    return (first + w.maybe_filler() + [why, way.format(d=w.pick(list(OPPOSITE)), g=goal)],
            f"now {a} is {at(goal)}, and {b} is still {at(home)}")


def give(w):
    a, b, _ = w.names()
    things, has = w.pick(MANY), w.rng.randint(2, 9)
    gives = w.rng.randint(1, min(3, has - 1))
    meet = w.pick(["it meets {} {}", "it sees {} {}"]).format(b, at(w.pick(list(PLACES))))
    why = w.pick(["{} has no {}", "{} asks for some {}", "{} would like some {}"]).format(b, things)
    return ([f"{a} has {amount(has, things)}", *w.maybe_filler(), meet, why, f"{a} gives {NUMBERS[gives]} of them to {b}"],
            f"now {a} has {amount(has - gives, things)}, and {b} has {NUMBERS[gives]}")


def find(w):
    a, _, _ = w.names()
    things, has, more = w.pick(MANY), w.rng.randint(1, 6), w.rng.randint(1, 3)
    search = w.pick(["it looks for more {}", "it looks around {}"]).format(at(w.pick(list(PLACES))))
    lucky = w.pick(["there it finds {} more", "a kind {} brings {} more"])
    lucky = lucky.format(NUMBERS[more]) if lucky.startswith("there") else lucky.format(w.pick(ANIMALS), NUMBERS[more])
    like = w.pick(["it likes {} very much", "it wants more {}", "it puts the {} into a bag"]).format(things)
    return [f"{a} has {amount(has, things)}", like, *w.maybe_filler(), search, lucky], f"now {a} has {amount(has + more, things)}"


def trade(w):
    a, b, _ = w.names()
    x, y = w.pick(THINGS, 2)
    meet = w.pick(["they meet {}", "they sit together {}"]).format(at(w.pick(list(PLACES))))
    need = w.pick(["{a} needs a {y}, and {b} needs a {x}", "{a} likes the {y}, and {b} likes the {x}"])
    return ([f"{a} has a {x}", f"{b} has a {y}", *w.maybe_filler(), meet, need.format(a=a, b=b, x=x, y=y),
             w.pick(["so they trade", "so they make a trade"])],
            f"now {a} has the {y}, and {b} has the {x}")


def event(w):
    a, b, _ = w.names()
    cause, safe, harmed, bad, good = w.pick(EVENTS)
    start = w.pick(["{a} and {b} are {p}", "{a} walks with {b} {p}"]).format(a=a, b=b, p=at(w.pick(list(PLACES))))
    x, y = w.shuffled([a, b])
    acts = w.shuffled([f"{x} {w.pick(safe)}", f"{y} {w.pick(harmed)}"])
    return [start, *w.maybe_filler(), cause, *acts, f"{x} looks at {y}"], f"{y} is {bad}, but {x} is {good}"


def turn(w):
    a, b, _ = w.names()
    c, d = w.pick(list(OPPOSITE), 2)
    wind = w.pick(["a strong wind turns both around", "a big wave turns both around", "then both hear a call and turn around"])
    return ([f"{a} moves {c}", f"{b} moves {d}", *w.maybe_filler(), wind],
            f"now {a} moves {OPPOSITE[c]}, and {b} moves {OPPOSITE[d]}")


def race(w):
    a, b, _ = w.names()
    start, goal = w.pick(list(PLACES), 2)
    x, y = w.shuffled([a, b])
    acts = w.shuffled([f"{x} is fast, but it stops {w.pick(DELAYS)}", f"{y} is slow, but it never stops"])
    return ([f"{a} meets {b} {at(start)}", f"they run a race to the {goal}", *w.maybe_filler(), *acts],
            f"so {y} wins the race, and {x} comes later")


def hide(w):
    a, b, _ = w.names()
    thing, spot = w.pick(SMALL), w.pick(HIDING)
    busy = w.pick(["then it goes to the {}", "then it sleeps {}", "then it plays {}"])
    place = w.pick(list(PLACES))
    busy = busy.format(place if "goes" in busy else at(place))
    ask = w.pick(["later {b} asks for the {t}", "in the evening {b} needs the {t}", "{b} wants to see the {t}"])
    return ([f"{a} has a {thing}", f"it hides the {thing} {spot}", busy, *w.maybe_filler(), ask.format(b=b, t=thing)],
            f"{a} looks {spot} and brings the {thing} to {b}")


def paint(w):
    a, b, _ = w.names()
    thing, place = w.pick(PAINTED), w.pick(list(PLACES))
    who, color, shape = w.pick(list(zip((a, b), w.colors, w.shapes)))
    other = b if who == a else a
    found = w.pick(["{} sees an old {} {}", "{} finds a grey {} {}"]).format(a, thing, at(place))
    return ([found, f"{b} comes to help", *w.maybe_filler(), f"{other} holds the ladder",
             f"{who} paints the {thing} in its own color"],
            f"now the {thing} is {color}, just like the {shape}")


def stack(w):
    a, b, c = w.names()
    want = w.pick(["they want to see over the wall", "they want to look into the window", "they want to look into the nest"])
    x, y, z = w.shuffled([a, b, c])
    pairs = w.shuffled([f"{a} stands on {b}", f"{b} stands on {c}"])
    return ([f"{x}, {y} and {z} play {at(w.pick(list(PLACES)))}", want, *w.maybe_filler(), *pairs],
            f"so {a} is at the top, and {c} is at the bottom")


def reach(w):
    a, b, c = w.names()
    pairs = w.shuffled([f"{a} is taller than {b}", f"{b} is taller than {c}"])
    fruit, animal = w.pick(["apple", "pear", "plum"]), w.pick(ANIMALS)
    return ([*pairs, *w.maybe_filler(), f"a hungry {animal} wants the {fruit} from the top of a tree",
             w.pick(["it asks the tallest friend", "only the tallest friend can help"])],
            f"{a} takes the {fruit} and gives it to the {animal}")


def secret(w):
    a, b, c = w.names()
    thing, spot = w.pick(SMALL), w.pick(HIDING)
    busy = w.pick(["{} goes home", "{} is too tired to go", "{} has to work"]).format(b)
    return ([f"{a} tells {b} a secret", f"there is a {thing} {spot}", *w.maybe_filler(), busy, f"so {b} tells {c} the secret"],
            f"{c} looks {spot} and finds the {thing}")


def wish(w):
    a, b, c = w.names()
    x, y = w.pick(THINGS, 2)
    makes = w.pick(["{} knows this and makes two gifts", "{} hears this and buys two gifts"]).format(c)
    party = w.pick(["they have a party {}", "all three meet {}"]).format(at(w.pick(list(PLACES))))
    return ([f"{a} would like a {x}", f"{b} would like a {y}", *w.maybe_filler(), makes, party],
            f"{c} gives the {x} to {a} and the {y} to {b}")


KINDS = [where, journey, give, find, trade, event, turn, race, hide, paint, stack, reach, secret, wish]


def sentence(words):
    end = "" if words.endswith(".") else "."
    return words[0].upper() + words[1:] + end


def make_tale(rng):
    """Draws one tale of four to nine sentences before "The end."."""
    kind, writer = rng.choice(KINDS), Writer(rng)
    body, last = kind(writer)
    if rng.random() < 0.35 or len(body) < 3:
        body = [writer.fill(OPENINGS)] + body
    return Tale(kind.__name__, " ".join(map(sentence, body)), sentence(last))
