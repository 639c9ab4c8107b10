"""Results in SQL: SQLite by default, PostgreSQL for teams. Queries are named by their answer."""
