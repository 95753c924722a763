# SPDX-License-Identifier: Apache-2.0
"""The words that facts are made of. No list holds a word twice, or a word that needs "an"."""

from __future__ import annotations

import random


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


PLACES = _words(
    "lantern garden tower bridge market harbour library station museum castle fountain bakery cellar chapel stable "
    "theatre workshop laboratory greenhouse lighthouse"
)
GOODS = _words(
    "apples blankets candles drums envelopes forks gloves hammers jackets kettles ladders mirrors needles oranges "
    "pencils ropes saddles tents umbrellas wheels anchors baskets chairs doors engines feathers glasses hats jars "
    "knives lamps maps nails ovens pillows rings shovels towels vases watches"
)
NAMES = _words(
    "Marta Oskar Lena Victor Irene Hugo Clara Felix Nora Bruno Alice Simon Edith Martin Paula Arthur Helga Jonas "
    "Sylvia Ralph"
)
CITIES = _words(
    "Bergen Lisbon Vienna Dublin Prague Boston Geneva Madrid Oslo Toronto Warsaw Athens Naples Havana Cairo Lima "
    "Zurich Helsinki Bristol Manila"
)
TREES = _words("oak maple willow birch cedar poplar chestnut walnut larch spruce elm olive")
ANIMALS = _words("horse parrot rabbit turtle goat donkey monkey spider camel tiger badger falcon")
FOODS = _words("pizza soup cheese rice salmon chocolate noodles pancakes mushrooms potatoes honey lentils")
DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
INSTRUMENTS = _words("piano violin guitar flute trumpet cello harp clarinet trombone banjo")
COLOURS = _words("red green blue yellow white black silver purple orange brown")
ADJECTIVES = _words(
    "quiet bright hollow gentle rapid frozen dusty golden narrow ancient clever hidden crooked lonely merry northern "
    "polished restless sturdy velvet"
)
# Short, common, of one form: what lists are made of. None is another's plural.
COMMON = _words(
    "arrow acorn badge barrel bench blade bottle branch brick broom bucket button cabin canvas carpet cattle cave "
    "chain chalk cherry cliff clock cloud coast copper corner cotton cradle creek crown curtain desert dragon eagle "
    "elbow feast fence field finger flag flame flute forest fossil frame frost ghost giant glove grain grape guard "
    "hammer harvest hedge helmet hill hook island ivory jewel jungle kettle kitten ladder lagoon lemon letter lily "
    "magnet marble meadow melon mill mirror moss mountain needle nest oasis ocean orchard oyster palace paper pearl "
    "pebble pepper pigeon pillow pine planet plate pocket pond powder puzzle quilt rabbit ribbon river rocket saddle "
    "sail shadow shell shield shore silk slope smoke snail spoon spring stone storm straw sugar sunset table tailor "
    "temple thorn thread ticket tiger timber torch tunnel turtle valley violet wagon walnut whale wheat window winter "
    "wolf wool yard zebra"
)


def numbers(rng: random.Random, how_many: int, digits: int = 5) -> list[str]:
    """Different numbers of so many digits, none of which begins like another: their first two digits differ."""
    heads = rng.sample(range(10, 100), how_many)
    return [f"{head}{rng.randrange(10 ** (digits - 2)):0{digits - 2}d}" for head in heads]
