"""`python -m quantwatch.cli`: the command line where no script is installed."""

from quantwatch.cli import main

if __name__ == "__main__":
    main()
