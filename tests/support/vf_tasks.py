"""Tasksets of verifiers for the tests."""

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=2.0)
    async def right(self, trace) -> float:
        return float(vf.extract_boxed_answer(trace.last_reply) == self.data.answer)

    @vf.reward
    async def brief(self, task, trace) -> float:
        assert task.answer
        assert trace.messages[-1].content == trace.last_reply
        return 0.5 * (len(trace.last_reply) < 12)

    @vf.metric
    async def length(self, trace) -> float:
        return float(len(trace.last_reply))


class SumConfig(vf.TasksetConfig):
    count: int = 20


class Sums(vf.Taskset[SumTask, SumConfig]):
    def load(self):
        for n in range(self.config.count):
            prompt = [vf.UserMessage(content=f"{n} + 1 = ?")] if n % 2 else f"{n} + 1 = ?"
            data = SumData(prompt=prompt, answer=str(n + 1), system_prompt="Box it.")
            yield SumTask(data, self.config.task)


class Endless(Sums):
    INFINITE = True

    def load(self):
        while True:
            yield from super().load()


class Boxed(SumTask):
    async def setup(self, trace, runtime):
        await runtime.run(["true"])


class NeedsBox(vf.Taskset[Boxed, SumConfig]):
    def load(self):
        yield Boxed(SumData(prompt="?", answer=""), self.config.task)


class Runner(SumTask):
    @vf.reward
    async def runs(self, trace, runtime) -> float:
        return 1.0


class NeedsRun(vf.Taskset[Runner, SumConfig]):
    def load(self):
        yield Runner(SumData(prompt="?", answer=""), self.config.task)
