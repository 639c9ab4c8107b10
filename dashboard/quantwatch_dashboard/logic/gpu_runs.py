"""What the GPUs did during runs, from the telemetry that attempts keep. Pure.

A quantity that a card, its driver or a container did not tell is None, never 0.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quantwatch.store.attempts import Telemetry


@dataclass(frozen=True, slots=True)
class CardUse:
    """One card during one attempt: bytes, percent, °C, watts."""

    uuid: str
    name: str
    memory_peak: float | None
    memory_total: float | None
    load_mean: float | None
    load_max: float | None
    hottest: float | None
    power_mean: float | None
    throttles: tuple[str, ...]
    ecc_uncorrected: float | None
    not_told: tuple[str, ...]
    """Quantities with the reason why they are not known."""

    @property
    def memory_share(self) -> float | None:
        """Peak of the memory as a share of the card's."""
        if self.memory_peak is None or not self.memory_total:
            return None
        return self.memory_peak / self.memory_total


@dataclass(frozen=True, slots=True)
class RunUse:
    """One attempt with its cards, () without; `why` says then why there are none."""

    attempt: Telemetry
    driver: str
    cards: tuple[CardUse, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Card:
    """One card over all attempts that were looked at."""

    uuid: str
    name: str
    num_attempts: int
    memory_peak: float | None
    memory_total: float | None
    hottest: float | None
    num_throttled: int
    ecc_uncorrected: float
    memory_shares: tuple[float | None, ...]
    """Oldest first."""


def run_uses(attempts: Iterable[Telemetry]) -> tuple[RunUse, ...]:
    """Return what each attempt kept of its GPUs, in the given order."""
    return tuple(map(_run_use, attempts))


def cards(uses: Sequence[RunUse]) -> tuple[Card, ...]:
    """Return every card that was seen; attempts come newest first."""
    found: dict[str, list[CardUse]] = {}
    for use in reversed(uses):
        for card in use.cards:
            found.setdefault(card.uuid, []).append(card)
    return tuple(_card(uuid, own) for uuid, own in found.items())


def _run_use(attempt: Telemetry) -> RunUse:
    kept = attempt.gpus or {}
    known = kept.get("gpus") or {}
    if attempt.gpus is not None:
        why = str(kept.get("not_available", "" if known else "nothing was told"))
    else:
        why = "not over yet" if attempt.ended_at is None else "not recorded"
    used = tuple(_card_use(uuid, card) for uuid, card in known.items())
    return RunUse(attempt, str(kept.get("driver", "")), used, why)


def _card_use(uuid: str, card: Mapping[str, Any]) -> CardUse:
    def told(name: str, which: str) -> float | None:
        value = (card.get(name) or {}).get(which)
        return None if value is None else float(value)

    missing = card.get("not_available") or {}
    return CardUse(
        uuid=str(uuid),
        name=str(card.get("name", "unnamed card")),
        memory_peak=told("memory_used_bytes", "max"),
        memory_total=told("memory_total_bytes", "max"),
        load_mean=told("utilisation_percent", "mean"),
        load_max=told("utilisation_percent", "max"),
        hottest=told("temperature_celsius", "max"),
        power_mean=told("power_watts", "mean"),
        throttles=tuple(map(str, card.get("throttle_reasons") or ())),
        ecc_uncorrected=told("ecc_uncorrected", "during"),
        not_told=tuple(f"{name}: {why}" for name, why in missing.items()),
    )


def _card(uuid: str, own: Sequence[CardUse]) -> Card:
    return Card(
        uuid=uuid,
        name=own[-1].name,
        num_attempts=len(own),
        memory_peak=_largest(use.memory_peak for use in own),
        memory_total=own[-1].memory_total,
        hottest=_largest(use.hottest for use in own),
        num_throttled=sum(bool(use.throttles) for use in own),
        ecc_uncorrected=sum(use.ecc_uncorrected or 0.0 for use in own),
        memory_shares=tuple(use.memory_share for use in own),
    )


def _largest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)
