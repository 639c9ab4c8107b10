"""Streamlit's server, which loads the pages before anybody asks for one.

Streamlit runs a script, and so imports what it needs, when the first browser connects: that one
would wait for imports that a server could have done meanwhile. Only a head start: a page that is
asked for earlier waits for the same imports and no longer than without it.
"""

import importlib
import threading

from streamlit.web import cli

from quantwatch_dashboard import late_timers

PAGES = "quantwatch_dashboard.views"


def load_pages() -> None:
    """Import every page and what it draws with."""
    importlib.import_module(PAGES)
    # Loaded by the first figure otherwise.
    importlib.import_module("plotly.graph_objects")


def main() -> None:
    """Serve as `streamlit` does, with its arguments."""
    late_timers.ignore()
    threading.Thread(target=load_pages, name="load-pages", daemon=True).start()
    cli.main(prog_name="streamlit")


if __name__ == "__main__":
    main()
