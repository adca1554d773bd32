"""`trimtab schema`."""

from __future__ import annotations

import json

from trimtab.cli.verb import new_app

app = new_app()


@app.command()
def schema() -> None:
    """Print the JSON schema of recipes.

    Save it and reference it in the first line of a recipe: editors with a YAML language server then complete keys,
    show their documentation and mark mistakes.

        trimtab schema > recipe.schema.json

        # yaml-language-server: $schema=recipe.schema.json
    """
    from trimtab.recipe import schema as recipe_schema

    print(json.dumps(recipe_schema(), indent=2, ensure_ascii=False))
