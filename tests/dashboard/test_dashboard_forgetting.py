"""After something was written, pages read anew."""

from quantwatch_dashboard.queries import connection, forgetting, overview


def test_what_was_read_is_forgotten_and_the_database_stays_open(demo_url: str) -> None:
    """Catches “paused” that shows only after a while, and an engine that is closed under others."""
    engine = connection.database(demo_url)
    before = overview.checks(demo_url)
    assert overview.checks(demo_url) is before
    forgetting.forget()

    assert overview.checks(demo_url) is not before
    assert overview.checks(demo_url) == before
    assert connection.database(demo_url) is engine


def test_every_cached_query_is_found() -> None:
    """Catches a module of queries whose cache outlives a change."""
    names = {f"{one.__module__}.{one.__name__}" for one in forgetting._cached()}

    assert "quantwatch_dashboard.queries.overview.checks" in names
    assert "quantwatch_dashboard.queries.tokens.grid" in names
    assert not any(isinstance(one, type) for one in forgetting._cached())
    assert not any(".connection." in name for name in names)
