"""A page: one HTML file that needs nothing else."""

from importlib.resources import files
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined


def page(template: str, **context: Any) -> str:
    """The HTML of one of this folder's templates. Every value is escaped unless it is markup of our own making."""

    def source(name: str) -> str:
        return files("engram_graft.probes").joinpath(name).read_text(encoding="utf-8")

    environment = Environment(
        loader=FunctionLoader(source), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template(template).render(**context) + "\n"
