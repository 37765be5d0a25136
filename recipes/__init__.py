"""One recipe module per model; see `recipe.py` for the type and the registry."""
