"""Sampling options, validated when they are created. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import InitVar, asdict, dataclass
from typing import TypedDict, cast

from trimtab.facts.arguments import check_float, check_int, refuse_unknown
from trimtab.facts.errors import RecipeError
from trimtab.facts.names import described


class SamplingKeywords(TypedDict, total=False):
    """The fields of `SamplingOptions` as keyword arguments."""

    max_new_tokens: int | None
    temperature: float | None
    top_p: float
    top_k: int
    stop: str | Sequence[str] | None
    seed: int


@dataclass(frozen=True)
class SamplingOptions:
    """Sampling and stopping options of text generation. Raises RecipeError for invalid values.

    Args:
        argument_name: returns an option's name as error messages write it; the command line passes its flags.

    Example:
        >>> SamplingOptions(top_p=0.9).sampling_temperature, SamplingOptions().sampling_temperature
        (1.0, 0.0)
    """

    max_new_tokens: int | None = None
    """None for 128 (512 in a conversation), or fewer if the model's context ends before."""
    temperature: float | None = None
    """0 is greedy decoding, 1 samples from the model's own distribution; None: see `sampling_temperature`."""
    top_p: float = 1.0
    """Nucleus sampling: keep the likeliest tokens whose probabilities add up to this value."""
    top_k: int = 0
    """Keep only the k likeliest tokens; 0 keeps all."""
    stop: str | Sequence[str] | None = ()
    """One or several stop strings; they are not part of the result. Normalized to a tuple."""
    seed: int = 0
    """The same seed gives the same text."""
    argument_name: InitVar[Callable[[str], str]] = str

    def __post_init__(self, argument_name: Callable[[str], str]) -> None:
        checked = {
            "max_new_tokens": None
            if self.max_new_tokens is None
            else check_int(self.max_new_tokens, argument_name("max_new_tokens"), least=1),
            "temperature": None
            if self.temperature is None
            else _in_range(
                self.temperature,
                argument_name("temperature"),
                "give a number: 0 (always the likeliest token) or more",
            ),
            "top_p": _in_range(
                self.top_p, argument_name("top_p"), "give a number above 0, at most 1", most=1.0
            ),
            "top_k": check_int(self.top_k, argument_name("top_k"), least=0),
            "stop": _stop_strings(self.stop, argument_name("stop")),
            "seed": check_int(self.seed, argument_name("seed")),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        limits = [argument_name(name) for name in self._limits()]
        if self.temperature == 0 and limits:
            warm = argument_name("temperature")
            raise RecipeError(
                f"{limits[0]} has no effect at {warm} 0, which always takes the likeliest token",
                f"give {warm} 0.7, or leave {' and '.join(limits)} out",
            )

    @property
    def sampling_temperature(self) -> float:
        """The effective temperature; the default is 1 if top_p or top_k is given, otherwise 0."""
        if self.temperature is None:
            return 1.0 if self._limits() else 0.0
        return self.temperature

    def keywords(self) -> SamplingKeywords:
        """All options as keyword arguments, for the methods of `trimtab.Model`.

        Example:
            >>> SamplingOptions(**SamplingOptions(seed=7).keywords()).seed
            7
        """
        return cast("SamplingKeywords", asdict(self))

    @classmethod
    def of(cls, given: SamplingKeywords) -> SamplingOptions:
        """Options from the `**sampling` keywords of a method; RecipeError for unknown keywords.

        Example:
            >>> SamplingOptions.of({"seed": 7}).seed
            7
        """
        refuse_unknown(given, SamplingKeywords.__annotations__, "option")
        return cls(**given)

    def _limits(self) -> list[str]:
        """The given options that remove tokens from the distribution."""
        return [name for name, given in (("top_p", self.top_p != 1.0), ("top_k", self.top_k != 0)) if given]


def _in_range(value: object, name: str, remedy: str, most: float | None = None) -> float:
    """Validate a temperature (finite, at least 0), or with `most` a probability (above 0, at most that)."""
    number = check_float(value, name, remedy)
    is_valid = 0 <= number < float("inf") if most is None else 0 < number <= most
    if not is_valid:
        raise RecipeError(f"{name} is {number}", remedy)
    return number


def _stop_strings(stop: object, name: str) -> tuple[str, ...]:
    if stop is None:
        return ()
    texts = [stop] if isinstance(stop, str) else list(stop) if isinstance(stop, Iterable) else [None]
    strings = tuple(text for text in texts if isinstance(text, str) and text)
    if len(strings) != len(texts):
        raise RecipeError(
            f"{name} is {described(stop)}", "give a text or a list of texts, none of them empty"
        )
    return strings
