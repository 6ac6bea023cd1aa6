"""`python -m gspo_env` is the command `gspo-env`."""

from gspo_env.cli.main import main

if __name__ == "__main__":
    main()
