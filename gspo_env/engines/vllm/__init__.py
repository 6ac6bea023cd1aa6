"""Engines that sample with vLLM, in this process or on servers."""
