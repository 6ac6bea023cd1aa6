"""An engine without a model."""

from gspo_env.engines.base import Completion, Engine


class Scripted(Engine):
    """Answers with the ids that a function of the prompt and the sampling returns."""

    weights_version = 0

    def __init__(self, answer):
        self.answer = answer

    async def generate(self, prompt_ids, sampling, session=None):
        ids = tuple(self.answer(prompt_ids, sampling))[: sampling.max_tokens]
        return Completion(
            token_ids=ids,
            logprobs=(-1.0,) * len(ids),
            finish_reason="stop" if ids[-1] in sampling.stop_ids else "length",
            weights_version=self.weights_version,
        )
