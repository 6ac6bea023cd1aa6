"""`gspo-env verify`."""

from __future__ import annotations

import sys
from pathlib import Path

import tyro

from gspo_env.errors import ConfigError
from gspo_env.settings import settings


@settings
class Verify:
    """Judge a training batch of any trainer: masks, ids, log-probabilities, rewards, advantages."""

    file: tyro.conf.Positional[str] = ""
    """A batch in the neutral form (`.jsonl`, `.parquet`, `.safetensors`), or the folder of a run,
    whose last kept training batch is judged."""
    model: str = ""
    """The weights that should have given the log-probabilities: a folder or a hub id."""
    tokenizer: str = ""
    """The tokenizer that decodes the ids; that of `--model` by default."""

    def run(self) -> None:
        """Prints the findings; exits with 1 if something is wrong."""
        if not self.file:
            raise ConfigError("file is ''; expected a batch, or the folder of a run")
        from gspo_env.env.registration import hide_progress_bars
        from gspo_env.health.findings import show
        from gspo_env.model.load import load_model, load_tokenizer
        from gspo_env.model.weights import find_weights
        from gspo_env.verify import batch, verify

        hide_progress_bars()
        is_run = Path(self.file).is_dir()
        judged = batch.of_run(self.file) if is_run else batch.read_batch(self.file)
        model = tokenizer = None
        if self.model:
            model, tokenizer = load_model(find_weights(self.model).folder)
            model.eval()
        if self.tokenizer:
            tokenizer = load_tokenizer(self.tokenizer)
        decode = None if tokenizer is None else tokenizer.decode
        findings = verify(judged, decode, model)
        faults = [finding for finding in findings if not finding.ok]
        trainer = f" of {judged.trainer}" if judged.trainer else ""
        print(f"{len(judged.rows)} rows{trainer}: {len(faults)} fault{'s' * (len(faults) != 1)}")
        print("\n".join(map(show, findings)))
        if faults:
            sys.exit(1)
