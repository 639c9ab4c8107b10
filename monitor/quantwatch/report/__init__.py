"""A run for people and programs: terminal, Markdown, HTML, JUnit and JSON."""
