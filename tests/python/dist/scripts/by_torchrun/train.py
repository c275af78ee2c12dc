"""The program of package.train, as a file."""

from package.train import main

if __name__ == "__main__":
    main()
