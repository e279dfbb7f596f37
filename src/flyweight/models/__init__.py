"""Families, loading and executors. `families` registers its own with `config.FAMILIES`."""

from flyweight.models import families as families
