"""Plain facts about the world, as tables (`world.toml` says what each column is)."""

from __future__ import annotations

from tools.starter.general import tables

_TABLES = tables.read("world")

ANIMALS = tables.rows(_TABLES["animals"])
COUNTRIES = tables.rows(_TABLES["countries"])
TOOLS = tables.rows(_TABLES["tools"])
CAUSES = tables.rows(_TABLES["causes"])
OPPOSITES = tables.rows(_TABLES["opposites"])
SEASONS = tables.rows(_TABLES["seasons"])
BODY = tables.rows(_TABLES["body"])
FOOD_ORIGINS = tables.rows(_TABLES["food_origins"])
CLASSES: dict[str, tuple[str, ...]] = {name: tuple(facts) for name, facts in _TABLES["classes"].items()}
