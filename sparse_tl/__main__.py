"""``python -m sparse_tl`` is ``sparse-tl``."""

from sparse_tl.cli import main

if __name__ == "__main__":
    main()
