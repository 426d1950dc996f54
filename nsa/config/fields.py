"""The base class of all sections of a configuration, and the types of their fields."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

HeadSize = Annotated[int, Field(ge=16, le=256, multiple_of=16)]
LARGEST = 2**31 - 1  # upper bound of counts
Positive = Annotated[int, Field(ge=1, le=LARGEST)]
NonNegative = Annotated[int, Field(ge=0, le=LARGEST)]
PositiveFloat = Annotated[float, Field(gt=0.0)]
NonNegativeFloat = Annotated[float, Field(ge=0.0)]
Text = Annotated[str, Field(min_length=1)]
Probability = Annotated[float, Field(ge=0.0, lt=1.0)]
Seconds = Annotated[float, Field(gt=0.0, le=2e6)]  # 23 days: the longest timeout that the operating system accepts


def field_error(field: str, message: str) -> PydanticCustomError:
    """Creates a validation error that is reported under a field of the section."""
    return PydanticCustomError("rule", "{message}", {"field": field, "message": message})


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
