"""What the sections of a config are made of: strict groups of fields, and common kinds of values."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(ge=1, le=2**40)]
Natural = Annotated[int, Field(ge=0, le=2**40)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Name = Annotated[str, Field(min_length=1)]
Switch = Literal["auto", "on", "off"]


class Conflict(ValueError):
    """Values that do not go together; `hint` says what would."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


class Section(BaseModel):
    """A strict, frozen group of fields: no unknown keys, no silent conversions, no NaN."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


def multiple_near(number: int, of: int) -> int:
    """The multiple of `of` that is nearest to a number, for a hint."""
    return max(1, round(number / of)) * of
