"""`python -m flyweight`: the command line where the package is on the path but not installed."""

from flyweight.cli import main

if __name__ == "__main__":
    main()
