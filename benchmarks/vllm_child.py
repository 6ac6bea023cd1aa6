"""Samples with vLLM for `rollout_model.py`: JSON lines in, seconds out."""

from __future__ import annotations

import json
import os
import sys
import time

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from vllm import LLM, SamplingParams

folder, dtype, mode, threads, context, rows = sys.argv[1:]
llm = LLM(
    model=folder,
    dtype=dtype,
    enforce_eager=mode == "eager",
    max_model_len=int(context),
    max_num_seqs=int(rows),
    **{"gpu_memory_utilization": 0.3} if torch.cuda.is_available() else {},  # not alone on it
)
torch.set_num_threads(int(threads))
clock = time.process_time if threads == "1" else time.perf_counter
for line in sys.stdin:
    request = json.loads(line)
    llm.reset_prefix_cache()
    params = [
        SamplingParams(max_tokens=request["new"], ignore_eos=True, logprobs=0, detokenize=False)
        for _ in request["prompts"]
    ]
    prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
    started = clock()
    llm.generate(prompts, params, use_tqdm=False)
    print("seconds", clock() - started, flush=True)
