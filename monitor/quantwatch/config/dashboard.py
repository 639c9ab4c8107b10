"""The dashboard: what those who sign in may do."""

from typing import Literal

from pydantic import Field

from quantwatch.config.base import Strict
from quantwatch.config.durations import PositiveDuration


class GrantsConfig(Strict):
    """Who is given which role, as globs. The highest role that fits is the one that counts."""

    admin: tuple[str, ...] = Field(
        default=(), description="Everything, also what touches receivers and quarantine."
    )
    operator: tuple[str, ...] = Field(
        default=(), description="Runs, pauses, baselines, alerts and single messages."
    )
    viewer: tuple[str, ...] = Field(default=(), description="Reading only.")


class DashboardConfig(Strict):
    """Roles of those who sign in. How one signs in is said in Streamlit's secrets.toml."""

    anonymous: Literal["none", "viewer"] = Field(
        default="none", description="What those may do who are not signed in, where one can."
    )
    roles: GrantsConfig = Field(
        default=GrantsConfig(),
        description="Globs over the verified e-mail address, in any case: `*@example.com`.",
    )
    groups_claim: str | None = Field(
        default=None,
        min_length=1,
        description="Claim of the identity token with the person's groups; dots lead into tables.",
    )
    groups: GrantsConfig = Field(
        default=GrantsConfig(), description="Globs over those groups; case matters."
    )
    trust_unmarked_email: bool = Field(
        default=False,
        description="Believe an address of which the provider does not say whether it is verified.",
    )
    session: PositiveDuration | None = Field(
        default=None,
        description="How long a sign-in lasts; until the identity token expires when absent.",
    )
