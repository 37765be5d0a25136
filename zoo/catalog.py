"""What `zoo list` says of the models."""

from __future__ import annotations

from typing import Any

from recipes.recipe import Recipe
from zoo.quantize import available
from zoo.targets import TARGETS

COLUMNS = ("model", "backend", "--qlinear", "--qembedding", "declared, no kernel", "")


def rows(recipes: list[Recipe]) -> list[tuple[str, ...]]:
    """A row of `COLUMNS` for each model on each backend."""
    return [
        (
            recipe.name,
            backend,
            ", ".join(available(recipe, backend)),
            ", ".join(available(recipe, backend, "embedding")),
            ", ".join(mode for mode in recipe.modes(backend) if mode not in available(recipe, backend)),
            target.summary,
        )
        if backend not in recipe.excluded
        else (recipe.name, backend, "", "", "", f"not possible: {recipe.excluded[backend]}")
        for recipe in recipes
        for backend, target in TARGETS.items()
    ]


def describe(recipe: Recipe) -> dict[str, Any]:
    """A model as JSON."""
    return {
        "name": recipe.name,
        "summary": recipe.summary,
        "checkpoint": recipe.checkpoint,
        "methods": list(recipe.methods),
        "dtypes": list(recipe.dtypes),
        "options": {name: list(choices) for name, choices in recipe.options.items()},
        "backends": {
            backend: {
                "runs": target.runs,
                "modes": list(recipe.modes(backend)),
                "available": [] if backend in recipe.excluded else list(available(recipe, backend)),
                **({"excluded": recipe.excluded[backend]} if backend in recipe.excluded else {}),
                **({"embeddings": list(available(recipe, backend, "embedding"))} if recipe.embeddings else {}),
            }
            for backend, target in TARGETS.items()
        },
    }
