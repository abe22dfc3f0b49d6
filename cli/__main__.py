"""`python -m engram_graft.cli` is the `engram-graft` command."""

from engram_graft.cli import main

if __name__ == "__main__":
    main()
